"""Write Megatron's torch_dist format in two steps: copy to host memory, then write files.

Megatron's own asynchronous writer forks, and starts a queue server that outlives a rank that is
killed. Here the thread that trains does all collectives (planning, metadata) and the copies; only
the writing of files may go to another thread.
"""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megatron_p3o.parallel.setup import ParallelContext


class StagedShards:
    """This rank's part of a checkpoint in host memory, and where it will be written."""

    def __init__(
        self, state: dict[str, Any], planner: MCoreSavePlanner, path: Path, context: ParallelContext
    ) -> None:
        """Plan who writes what, and copy this rank's share. Collective.

        Args:
            state: tensors by checkpoint key, as torch.distributed.checkpoint takes them. Free to
                change afterwards.
            planner: of this save.
            path: an existing directory.
            context: where this rank stands.
        """
        # Data is in host memory already, so nothing needs to be copied ahead of writing.
        self._writer = FileSystemWriter(path, per_thread_copy_ahead=0)
        self._metadata: Metadata | None = None
        is_coordinator = context.rank == 0
        planner.set_up_planner(
            state, storage_meta=self._writer.storage_meta(), is_coordinator=is_coordinator
        )
        self._writer.set_up_storage_writer(is_coordinator)
        local = self._writer.prepare_local_plan(planner.create_local_plan())
        gathered: list[Any] | None = [None] * context.layout.world_size if is_coordinator else None
        dist.gather_object(local, gathered, dst=0, group=context.control_group)
        plans: list[SavePlan] | None = None
        if gathered is not None:
            plans, self._metadata = planner.create_global_plan(gathered)
            plans = self._writer.prepare_global_plan(plans)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, plans, src=0, group=context.control_group)
        self._plan: SavePlan = planner.finish_plan(mine[0])
        self._data = _HostData(planner, self._plan)

    def write(self) -> list[WriteResult]:
        """Write and sync this rank's file. No collectives: any thread may do it.

        Returns:
            What `finish` needs from every rank.
        """
        future = self._writer.write_data(self._plan, cast(SavePlanner, self._data))
        future.wait()
        return future.value()

    def finish(self, results: Sequence[list[WriteResult]]) -> None:
        """On rank 0, with every rank's results in rank order: write the index of the files."""
        assert self._metadata is not None
        self._writer.finish(self._metadata, list(results))


class StageOnly(TorchDistSaveShardedStrategy):
    """A strategy for `dist_checkpointing.save` that leaves the shards to `staged`."""

    def __init__(self, context: ParallelContext) -> None:
        super().__init__("torch_dist", 1)
        self._context = context
        self.staged: StagedShards | None = None

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        planner = MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
        )
        state = mcore_to_pyt_state_dict(by_key, False)
        self.staged = StagedShards(state, planner, Path(checkpoint_dir), self._context)


class _HostData:
    """Stands in for the planner when files are written: copies by place in the checkpoint."""

    def __init__(self, planner: MCoreSavePlanner, plan: SavePlan) -> None:
        self._values: dict[MetadataIndex, Tensor | BytesIO] = {}
        for item in plan.items:
            value = planner.resolve_data(item)
            if isinstance(value, Tensor):
                value = value.detach().to("cpu", copy=True)
            self._values[item.index] = value

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        return self._values[write_item.index]
