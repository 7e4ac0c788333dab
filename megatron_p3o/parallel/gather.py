"""Whole-model views of sharded parameters: tensor shards of any parameter, on every rank."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_p3o.parallel.setup import ParallelContext


class ShardGatherer:
    """Hands out the tensor-parallel shards of one parameter at a time, on every rank.

    Collective: all ranks must call it with the same names in the same order. One parameter's
    shards exist at a time beyond the model itself.
    """

    def __init__(self, parameters: Mapping[str, Tensor], context: ParallelContext) -> None:
        """
        Args:
            parameters: this rank's local parameters by global Megatron name.
            context: where this rank stands.
        """
        self._parameters = parameters
        self._context = context
        described = {
            name: (parameter.shape, parameter.dtype) for name, parameter in parameters.items()
        }
        stages: list[dict[str, tuple[torch.Size, torch.dtype]]] = [{}] * context.layout.pipeline
        if context.layout.pipeline > 1:
            dist.all_gather_object(stages, described, group=context.pipeline_group)
        else:
            stages = [described]
        self._owners = {
            name: (stage, *description)
            for stage, names in reversed(list(enumerate(stages)))
            for name, description in names.items()
        }

    def names(self) -> Sequence[str]:
        """Every parameter of the model, over all stages."""
        return sorted(self._owners)

    def __call__(self, name: str) -> list[Tensor]:
        """The shards in tensor-rank order.

        Raises:
            KeyError: no stage holds a parameter of this name.
        """
        stage, shape, dtype = self._owners[name]
        context = self._context
        is_owner = context.coordinates.pipeline == stage
        if is_owner:
            local = self._parameters[name].detach().contiguous()
            shards = [local]
            if context.layout.tensor > 1:
                shards = [torch.empty_like(local) for _ in range(context.layout.tensor)]
                dist.all_gather(shards, local, group=context.tensor_group)
        else:
            shards = [
                torch.empty(shape, dtype=dtype, device=context.device)
                for _ in range(context.layout.tensor)
            ]
        if context.layout.pipeline > 1:
            source = dist.get_global_rank(context.pipeline_group, stage)
            for shard in shards:
                dist.broadcast(shard, src=source, group=context.pipeline_group)
        return shards
