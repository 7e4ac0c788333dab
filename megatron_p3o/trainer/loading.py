"""From a Hugging Face model directory into the shards of a Megatron model."""

from pathlib import Path

from megatron_p3o.architecture import ModelArchitecture
from megatron_p3o.parallel.model import PolicyModel
from megatron_p3o.parallel.setup import ParallelContext
from megatron_p3o.weights import HfReader, TensorShard, load_hf_weights


def load_model_dir(
    model: PolicyModel, model_dir: str, architecture: ModelArchitecture, context: ParallelContext
) -> None:
    """Fill this rank's parameters, tensor by tensor.

    Args:
        model: built for `architecture`.
        model_dir: its weights' directory.
        architecture: of that directory.
        context: where this rank stands.
    """
    expert = context.expert_coordinates
    with HfReader(Path(model_dir)) as reader:
        load_hf_weights(
            reader,
            architecture,
            dict(model.named_weights()),
            dense=TensorShard(context.coordinates.tensor, context.layout.tensor),
            expert=TensorShard(expert.expert_tensor, context.layout.expert_tensor),
        )
