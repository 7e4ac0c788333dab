"""Whole-model views of sharded parameters: tensor shards of any parameter, on every rank."""

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_p3o.parallel import fp8
from megatron_p3o.parallel.setup import ParallelContext


class _Owner(NamedTuple):
    """Where a parameter lives and what one of its shards looks like."""

    stage: int
    expert_rank: int | None
    """Place in the expert group; None when every rank of the stage holds the parameter."""
    shape: torch.Size
    dtype: torch.dtype


class ShardGatherer:
    """Hands out the tensor shards of one parameter at a time, on every rank.

    Collective: all ranks must call it with the same names in the same order. One parameter's
    shards exist at a time beyond the model itself.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], experts: Set[str], context: ParallelContext
    ) -> None:
        """
        Args:
            parameters: this rank's local parameters by global Megatron name.
            experts: those that belong to an expert.
            context: where this rank stands.
        """
        self._parameters = parameters
        self._context = context
        expert_rank = context.expert_coordinates.expert
        described = {
            name: _Owner(
                context.coordinates.pipeline,
                expert_rank if name in experts else None,
                parameter.shape,
                parameter.dtype,
            )
            for name, parameter in parameters.items()
        }
        for group in (context.expert_group, context.pipeline_group):
            everyone: list[dict[str, _Owner]] = [{}] * dist.get_world_size(group)
            dist.all_gather_object(everyone, described, group=group)
            # The first stage owns what two stages hold: it has the original of a tied embedding.
            described = {n: o for part in reversed(everyone) for n, o in part.items()}
        self._owners = described

    def names(self) -> Sequence[str]:
        """Every parameter of the model, over all stages and experts."""
        return sorted(self._owners)

    def __call__(self, name: str) -> list[Tensor]:
        """The shards in the order of the tensor ranks, or expert tensor ranks.

        Raises:
            KeyError: no rank holds a parameter of this name.
        """
        owner, context = self._owners[name], self._context
        is_expert = owner.expert_rank is not None
        shard_group = context.expert_tensor_group if is_expert else context.tensor_group
        num_shards = dist.get_world_size(shard_group)
        in_stage = context.coordinates.pipeline == owner.stage
        if in_stage and owner.expert_rank in (None, context.expert_coordinates.expert):
            local = fp8.plain(self._parameters[name].detach()).contiguous()
            shards = [local]
            if num_shards > 1:
                shards = [torch.empty_like(local) for _ in range(num_shards)]
                dist.all_gather(shards, local, group=shard_group)
        else:
            shards = [
                torch.empty(owner.shape, dtype=owner.dtype, device=context.device)
                for _ in range(num_shards)
            ]
        if in_stage and owner.expert_rank is not None:
            _broadcast(shards, owner.expert_rank, context.expert_group)
        _broadcast(shards, owner.stage, context.pipeline_group)
        return shards


def _broadcast(tensors: Sequence[Tensor], source: int, group: dist.ProcessGroup) -> None:
    """From the `source`-th rank of the group to the others."""
    if dist.get_world_size(group) > 1:
        for tensor in tensors:
            dist.broadcast(tensor, src=dist.get_global_rank(group, source), group=group)
