"""transformers' parameters by the names of a Hugging Face checkpoint.

transformers 5 stacks a layer's experts, gates above ups, into one parameter in memory; the
checkpoint keeps one tensor for each projection of each expert, by other names for Mixtral.
"""

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor
from transformers import PreTrainedModel

_PROJECTIONS = MappingProxyType({"gate": "gate_proj", "up": "up_proj", "down": "down_proj"})
_MIXTRAL_PROJECTIONS = MappingProxyType({"gate": "w1", "up": "w3", "down": "w2"})


def checkpoint_parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    """Weights, or views of them, by the names of a checkpoint."""
    named: dict[str, Tensor] = {}
    biases = (item for item in model.named_buffers() if item[0].endswith("e_score_correction_bias"))
    for name, tensor in (*model.named_parameters(), *biases):
        module, _, stacked = name.rpartition(".")
        if module.endswith(".experts") and stacked == "gate_up_proj":
            for expert, both in enumerate(tensor.detach()):
                names = expert_weights(model, module, expert)
                for projection, part in zip(("gate", "up"), both.chunk(2), strict=True):
                    named[names[projection]] = part
        elif module.endswith(".experts") and stacked == "down_proj":
            for expert, part in enumerate(tensor.detach()):
                named[expert_weights(model, module, expert)["down"]] = part
        else:
            named[_prefix(model, name)] = tensor
    return named


def expert_weights(model: PreTrainedModel, module: str, expert: int) -> Mapping[str, str]:
    """Checkpoint names of one expert's weights: of its gate, up and down.

    Args:
        model: which the module belongs to.
        module: name of the module that stacks a layer's experts.
        expert: its number in the layer.
    """
    projections = _MIXTRAL_PROJECTIONS if _is_mixtral(model) else _PROJECTIONS
    prefix = _prefix(model, module)
    return {key: f"{prefix}.{expert}.{name}.weight" for key, name in projections.items()}


def _prefix(model: PreTrainedModel, name: str) -> str:
    return name.replace(".mlp.", ".block_sparse_moe.") if _is_mixtral(model) else name


def _is_mixtral(model: PreTrainedModel) -> bool:
    return model.config.model_type == "mixtral"
