"""Checkpoints that are written while training goes on."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_p3o.architecture import read_architecture
from megatron_p3o.config import RunConfig
from megatron_p3o.errors import RunError
from megatron_p3o.parallel.checkpoint import CheckpointStore
from megatron_p3o.parallel.layout import ParallelLayout
from megatron_p3o.parallel.setup import initialize, shut_down
from megatron_p3o.parallel.shards import StagedShards
from megatron_p3o.rollout import ReplayRollouts
from megatron_p3o.run_dir import RunDir
from megatron_p3o.trainer.experience import RecordedRollouts, score_groups
from megatron_p3o.trainer.policy import Policy
from tests.dist.harness import next_rendezvous, spawn
from tests.dist.models import make_model, make_recording, replay_config

STATE: dict[str, Any] = {"step": 1, "weight_version": 1}


class Gate:
    """Lets the background threads of chosen ranks write only when told, or makes them fail."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.error: OSError | None = None
        self._write = StagedShards.write
        gate = self

        def write(shards: StagedShards) -> Any:
            assert gate.open.wait(timeout=60)
            if gate.error is not None:
                raise gate.error
            return gate._write(shards)

        patch.setattr(StagedShards, "write", write)


def update(policy: Policy, rollouts: RecordedRollouts, step: int) -> tuple[float, float]:
    """One optimizer step; loss and gradient norm."""
    batch = policy.microbatches(score_groups(rollouts.collect(step).groups, policy.config))
    metrics = policy.update(batch, policy.trust(batch, policy.score(batch)))
    return metrics["loss/total"].value, metrics["grad_norm"].value


def weights_of(policy: Policy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.named_tensors()}


def latest(run_dir: RunDir) -> str | None:
    pointer = run_dir.checkpoints / "latest"
    return pointer.read_text() if pointer.exists() else None


def save_while_training(config: RunConfig) -> None:
    """Run on a rank."""
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch)
        layout = ParallelLayout.for_world(config.layout, int(os.environ["WORLD_SIZE"]))
        context = initialize(layout, seed=0)
        architecture = read_architecture(config.model.path)
        rollouts = RecordedRollouts(ReplayRollouts(Path(str(config.rollout.replay_path))))
        run_dir = RunDir(Path(config.run.dir))
        policy = Policy(config, architecture, context)
        store = CheckpointStore(run_dir, context, keep=3)
        update(policy, rollouts, 0)

        store.begin(1, policy.model, policy.optimizer, STATE)
        saved = weights_of(policy)
        straight = update(policy, rollouts, 1)
        after = weights_of(policy)
        assert any(not torch.equal(saved[name], after[name]) for name in saved)
        if context.rank == 1:  # the other has not written yet
            gate.open.set()
            store._pending.written.result()  # type: ignore[union-attr]
        context.barrier()
        store.advance()
        assert latest(run_dir) is None and not (run_dir.checkpoints / "step_1").exists()
        gate.open.set()
        store.complete()
        assert latest(run_dir) == "step_1"

        if context.rank == 1:
            gate.error = OSError(28, "No space left on device")
        store.begin(2, policy.model, policy.optimizer, STATE)
        with pytest.raises(RunError, match=r"^rank 1 cannot write .*No space left on device"):
            store.complete()
        assert latest(run_dir) == "step_1"
        gate.error = None
        for step in (3, 4):  # the second waits for the first
            store.begin(step, policy.model, policy.optimizer, STATE)
        assert latest(run_dir) == "step_3"
        store.complete()
        context.barrier()
        kept = {path.name for path in run_dir.checkpoints.iterdir()}
        assert kept == {"latest", "step_1", "step_3", "step_4"}
        if context.rank == 0:
            (run_dir.checkpoints / "latest").write_text("step_1")
        context.barrier()
        shut_down()

        next_rendezvous()
        context = initialize(layout, seed=1)
        policy = Policy(config, architecture, context)
        state = CheckpointStore(run_dir, context, keep=3).load_latest(
            policy.model, policy.optimizer
        )
        assert state == STATE
        for name, tensor in weights_of(policy).items():
            assert torch.equal(tensor, saved[name]), name
        assert update(policy, rollouts, 1) == straight
        for name, tensor in weights_of(policy).items():
            assert torch.equal(tensor, after[name]), name
        shut_down()


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", tied=False)
    recording = make_recording(
        tmp_path / "samples.jsonl", model, steps=2, groups=2, group_size=2, noise=0.2
    )
    config = replay_config(
        model,
        recording,
        steps=2,
        groups=2,
        group_size=2,
        run={"dir": str(tmp_path / "run")},
        layout={"data": 2},
    )
    spawn(save_while_training, 2, config, num_rendezvous=2)
