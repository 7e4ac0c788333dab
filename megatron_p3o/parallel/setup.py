"""Process groups and device of this rank, made once at start-up and passed explicitly."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

from megatron_p3o.parallel import cpu
from megatron_p3o.parallel.layout import Coordinates, ExpertCoordinates, ParallelLayout

T = TypeVar("T")

# A rank that waits longer than this for its peers has lost one of them.
_COLLECTIVE_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, kw_only=True)
class ParallelContext:
    """This rank's place in the layout, its device, and the groups it talks in.

    `data_group` joins all data-parallel and context ranks that hold the same part of the model:
    sums over tokens are complete after one all-reduce there, on the last pipeline stage.
    `expert_group` joins the ranks that share a layer's experts, `expert_tensor_group` those that
    share each expert's matrices. `control_group` joins all ranks on gloo, for Python objects.
    """

    layout: ParallelLayout
    rank: int
    coordinates: Coordinates
    expert_coordinates: ExpertCoordinates
    device: torch.device
    tensor_group: dist.ProcessGroup
    pipeline_group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    expert_group: dist.ProcessGroup
    expert_tensor_group: dist.ProcessGroup
    control_group: dist.ProcessGroup

    @property
    def is_first_stage(self) -> bool:
        return self.coordinates.pipeline == 0

    @property
    def is_last_stage(self) -> bool:
        return self.coordinates.pipeline == self.layout.pipeline - 1

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last stage of this rank's pipeline."""
        return dist.get_global_rank(self.pipeline_group, self.layout.pipeline - 1)

    def sum_tokens(self, sums: Tensor) -> Tensor:
        """Complete sums over tokens on every rank.

        Args:
            sums: this rank's partial sums; read on the last pipeline stage only, but its shape
                and dtype must agree on all ranks.
        """
        return self._reduce_on_last_stage(sums, dist.ReduceOp.SUM)

    def max_tokens(self, values: Tensor) -> Tensor:
        """As `sum_tokens`, with the elementwise maximum."""
        return self._reduce_on_last_stage(values, dist.ReduceOp.MAX)

    def _reduce_on_last_stage(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        values = values.to(self.device, copy=True)
        if self.is_last_stage:
            dist.all_reduce(values, op=op, group=self.data_group)
        if self.layout.pipeline > 1:
            dist.broadcast(values, src=self.last_stage_rank, group=self.pipeline_group)
        return values.cpu()

    def sum_everywhere(self, sums: Tensor) -> Tensor:
        """Sum over all ranks, on every rank."""
        sums = sums.to(self.device, copy=True)
        dist.all_reduce(sums)
        return sums.cpu()

    def gather_objects(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""
        values: list[Any] = [None] * self.layout.world_size
        dist.all_gather_object(values, value, group=self.control_group)
        return values

    def broadcast_object(self, value: T | None) -> T:
        """Rank 0's value, on every rank; what the others pass is not read."""
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0, group=self.control_group)
        return values[0]

    def barrier(self) -> None:
        dist.barrier(group=self.control_group)


def initialize(layout: ParallelLayout, *, seed: int) -> ParallelContext:
    """Join the ranks that torchrun (or an equivalent environment) started.

    Args:
        layout: its world size must equal the environment's WORLD_SIZE.
        seed: for Megatron's random state tracker.
    """
    device = _claim_device()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", timeout=_COLLECTIVE_TIMEOUT
    )
    assert dist.get_world_size() == layout.world_size

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=(
            layout.virtual_pipeline if layout.virtual_pipeline > 1 else None
        ),
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        create_gloo_process_groups=True,
    )
    model_parallel_cuda_manual_seed(seed % 2**31)
    rank = dist.get_rank()
    return ParallelContext(
        layout=layout,
        rank=rank,
        coordinates=layout.coordinates(rank),
        expert_coordinates=layout.expert_coordinates(rank),
        device=device,
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        pipeline_group=parallel_state.get_pipeline_model_parallel_group(),
        data_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        expert_group=parallel_state.get_expert_model_parallel_group(),
        expert_tensor_group=parallel_state.get_expert_tensor_parallel_group(),
        control_group=dist.new_group(backend="gloo", timeout=_COLLECTIVE_TIMEOUT),
    )


def shut_down() -> None:
    """Leave all groups. After this the process may exit or initialize again."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _claim_device() -> torch.device:
    if cpu.device_type() == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        return torch.device("cuda", torch.cuda.current_device())
    cpu.stand_in_for_cuda()
    return torch.device("cpu")
