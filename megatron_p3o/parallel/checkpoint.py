"""Checkpoints: Megatron's distributed format for tensors, JSON for the rest, complete or absent.

    checkpoints/step_<N>/    model and optimizer shards (torch_dist), rng/rank_<r>.pt, trainer.json
    checkpoints/latest       text: the name of the newest complete checkpoint

A checkpoint is written under a temporary name, synced, and renamed when every rank is done, so a
directory named `step_<N>` is always complete.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_p3o.parallel.model import PolicyModel
from megatron_p3o.parallel.optimizer import PolicyOptimizer
from megatron_p3o.parallel.setup import ParallelContext
from megatron_p3o.run_dir import RunDir, read_trainer_state, replace_text, trainer_state_path


class _SaveInProcess(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist format, written by the rank itself.

    Megatron's own writer forks, and starts a queue server that outlives a rank that is killed.
    """

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(by_key, False),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica,
                flatten_state_dict=False,
            ),
        )


class CheckpointStore:
    """Saves and loads a run's whole training state. All calls are collective."""

    def __init__(self, run_dir: RunDir, context: ParallelContext, *, keep: int) -> None:
        """
        Args:
            run_dir: its `checkpoints` directory is made when first needed.
            context: where this rank stands.
            keep: complete checkpoints to keep.
        """
        self._run_dir = run_dir
        self._root = run_dir.checkpoints
        self._context = context
        self._keep = keep

    def save(
        self,
        step: int,
        model: PolicyModel,
        optimizer: PolicyOptimizer,
        trainer_state: Mapping[str, Any],
    ) -> None:
        """Write `step_<step>` and make it the latest.

        Args:
            step: finished steps.
            model: its parameters are saved.
            optimizer: its state and schedule are saved.
            trainer_state: JSON-ready; the same on every rank.
        """
        final = self._root / f"step_{step}"
        partial = self._root / f".partial_step_{step}"
        if self._context.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self._context.barrier()
        dist_checkpointing.save(
            self._sharded_state(model, optimizer, is_loading=False),
            str(partial),
            _SaveInProcess("torch_dist", 1),
        )
        (partial / "rng").mkdir(exist_ok=True)
        torch.save(_rng_state(), partial / "rng" / f"rank_{self._context.rank}.pt")
        self._context.barrier()
        if self._context.rank == 0:
            state = {**trainer_state, "scheduler": optimizer.scheduler.state_dict()}
            trainer_state_path(partial).write_text(json.dumps(state, indent=2), encoding="utf-8")
            _sync_tree(partial)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            replace_text(self._root / "latest", final.name)
            self._remove_old()
        self._context.barrier()

    def load_latest(self, model: PolicyModel, optimizer: PolicyOptimizer) -> dict[str, Any]:
        """Restore the newest complete checkpoint.

        Returns:
            The `trainer_state` that was saved with it.
        """
        directory = self._run_dir.latest_checkpoint()
        state = read_trainer_state(directory)
        loaded = dist_checkpointing.load(
            self._sharded_state(model, optimizer, is_loading=True), str(directory)
        )
        for key, module in _chunks_by_key(model).items():
            module.load_state_dict(loaded[key])
        optimizer.load_state(loaded["optimizer"])
        optimizer.scheduler.load_state_dict(state.pop("scheduler"))
        rng_file = directory / "rng" / f"rank_{self._context.rank}.pt"
        if rng_file.exists():  # absent when more ranks resume than saved
            _restore_rng_state(torch.load(rng_file, weights_only=True))
        self._context.barrier()
        return state

    def _sharded_state(
        self, model: PolicyModel, optimizer: PolicyOptimizer, *, is_loading: bool
    ) -> dict[str, Any]:
        chunks = {key: m.sharded_state_dict() for key, m in _chunks_by_key(model).items()}
        return {**chunks, "optimizer": optimizer.sharded_state(chunks, is_loading=is_loading)}

    def _remove_old(self) -> None:
        complete = sorted(self._root.glob("step_*"), key=lambda path: int(path.name[5:]))
        for directory in complete[: -self._keep]:
            shutil.rmtree(directory)


def _chunks_by_key(model: PolicyModel) -> dict[str, Any]:
    """Model chunks by the keys that Megatron's optimizers look for.

    Tensors are stored by their place in the whole model, so the keys do not bind a checkpoint to
    its layout.
    """
    if len(model.modules) == 1:
        return {"model": model.modules[0]}
    return {f"model{index}": module for index, module in enumerate(model.modules)}


def _rng_state() -> dict[str, Any]:
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "megatron": dict(get_cuda_rng_tracker().get_states()),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_rng_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["megatron"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _sync_tree(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
