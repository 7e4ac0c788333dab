"""Checkpoints: Megatron's distributed format for tensors, JSON for the rest, complete or absent.

    checkpoints/step_<N>/    model and optimizer shards (torch_dist), rng/rank_<r>.pt, trainer.json
    checkpoints/latest       text: the name of the newest complete checkpoint

A checkpoint is copied to host memory, written by a background thread under a temporary name,
synced, and renamed when every rank is done, so a directory named `step_<N>` is always complete.
Collectives are made by the calling thread only.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.storage import WriteResult

from megatron_p3o.errors import RunError
from megatron_p3o.parallel.model import PolicyModel
from megatron_p3o.parallel.optimizer import PolicyOptimizer
from megatron_p3o.parallel.setup import ParallelContext
from megatron_p3o.parallel.shards import StagedShards, StageOnly
from megatron_p3o.run_dir import RunDir, read_trainer_state, replace_text, trainer_state_path


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """A checkpoint that is being written."""

    name: str
    partial: Path
    shards: StagedShards
    written: "Future[list[WriteResult]]"
    trainer_state: str


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
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: _Pending | None = None

    def begin(
        self,
        step: int,
        model: PolicyModel,
        optimizer: PolicyOptimizer,
        trainer_state: Mapping[str, Any],
    ) -> None:
        """Copy everything to host memory and start writing `step_<step>`, which `advance` or
        `complete` makes the latest. Waits for an earlier one that is still being written.

        Args:
            step: finished steps.
            model: its parameters are saved; free to change afterwards.
            optimizer: its state and schedule are saved; free to change afterwards.
            trainer_state: JSON-ready; the same on every rank.

        Raises:
            RunError: on every rank, when this or the earlier checkpoint cannot be written.
        """
        self.complete()
        partial = self._root / f".partial_step_{step}"
        self._on_rank_0(lambda: self._prepare(partial))
        strategy = StageOnly(self._context)
        dist_checkpointing.save(
            self._sharded_state(model, optimizer, is_loading=False), str(partial), strategy
        )
        shards, rng = strategy.staged, _rng_state()
        assert shards is not None
        state = {**trainer_state, "scheduler": optimizer.scheduler.state_dict()}
        self._pending = _Pending(
            name=f"step_{step}",
            partial=partial,
            shards=shards,
            written=self._thread.submit(self._write, partial, shards, rng),
            trainer_state=json.dumps(state, indent=2),
        )

    def advance(self) -> None:
        """Make the checkpoint that is being written the latest, if every rank has written it.

        Raises:
            RunError: on every rank, when it cannot be written; the latest is as before.
        """
        if self._pending is not None and all(
            self._context.gather_objects(self._pending.written.done())
        ):
            self.complete()

    def complete(self) -> None:
        """As `advance`, but wait for every rank's files."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        error = pending.written.exception()  # waits
        self._raise_on_any(None if error is None else f"{type(error).__name__}: {error}")
        results = self._context.gather_objects(pending.written.result())
        self._on_rank_0(lambda: self._commit(pending, results))

    def _write(self, partial: Path, shards: StagedShards, rng: dict[str, Any]) -> list[WriteResult]:
        (partial / "rng").mkdir(exist_ok=True)
        torch.save(rng, partial / "rng" / f"rank_{self._context.rank}.pt")
        return shards.write()

    def _prepare(self, partial: Path) -> None:
        # Nothing is being written, so these are of runs that were ended.
        for left_over in self._root.glob(".partial_step_*"):
            shutil.rmtree(left_over)
        partial.mkdir(parents=True)

    def _commit(self, pending: _Pending, results: list[list[WriteResult]]) -> None:
        pending.shards.finish(results)
        trainer_state_path(pending.partial).write_text(pending.trainer_state, encoding="utf-8")
        for path in [*pending.partial.rglob("*"), pending.partial]:
            _sync(path)
        final = self._root / pending.name
        shutil.rmtree(final, ignore_errors=True)
        pending.partial.rename(final)
        _sync(self._root)
        replace_text(self._root / "latest", final.name)
        self._remove_old()

    def _on_rank_0(self, action: Callable[[], None]) -> None:
        """Do it on rank 0, while the others wait; an OSError is a RunError on all."""
        problem = None
        if self._context.rank == 0:
            try:
                action()
            except OSError as error:
                problem = f"{type(error).__name__}: {error}"
        self._raise_on_any(problem)

    def _raise_on_any(self, problem: str | None) -> None:
        problems = self._context.gather_objects(problem)
        for rank, text in enumerate(problems):
            if text is not None:
                raise RunError(
                    f"rank {rank} cannot write a checkpoint to {str(self._root)!r}: {text}; the "
                    "checkpoint before it is valid. Mend the directory (space, permissions) and "
                    "continue with --resume"
                )

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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
