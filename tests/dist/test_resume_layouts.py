"""Layers and experts split in every way: the same update as one rank, and checkpoints that move."""

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_p3o.architecture import read_architecture
from megatron_p3o.config import RunConfig
from megatron_p3o.parallel import model as parallel_model
from megatron_p3o.parallel.checkpoint import CheckpointStore
from megatron_p3o.parallel.layout import ParallelLayout
from megatron_p3o.parallel.setup import initialize, shut_down
from megatron_p3o.rollout import ReplayRollouts
from megatron_p3o.run_dir import RunDir, replace_text
from megatron_p3o.trainer.display import SilentDisplay
from megatron_p3o.trainer.experience import RecordedRollouts
from megatron_p3o.trainer.loop import Observers, train
from megatron_p3o.trainer.policy import Policy
from tests.dist.harness import next_rendezvous, spawn
from tests.dist.matrix import Kept
from tests.dist.models import make_model, make_recording, replay_config
from tests.dist.test_invariance import Run, assert_same_update, run_all

STEPS, GROUPS, GROUP_SIZE = 3, 4, 4
ROUTER = (
    "router/load_max_over_mean",
    "router/load_max_over_mean_worst",
    "router/balance_loss",
    "router/entropy_mean",
)
SEQUENCE = {"tensor": 2, "sequence_parallel": True}
# Adam divides by the gradient's own size, and experts with few tokens have entries that are
# nothing but rounding; a larger eps keeps those from moving weights.
OPTIMIZER = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-5}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return _model_and_recording(tmp_path_factory.mktemp("dense"), "llama", tied=True)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The first of its four layers is dense, so that layers differ."""
    directory = tmp_path_factory.mktemp("moe")
    return _model_and_recording(directory, "qwen3_moe", tied=False, mlp_only_layers=[0])


def _model_and_recording(
    directory: Path, family: str, *, tied: bool, **changes: object
) -> tuple[Path, Path]:
    model = make_model(directory / "model", family, tied=tied, **changes)
    recording = make_recording(
        directory / "samples.jsonl",
        model,
        steps=STEPS,
        groups=GROUPS,
        group_size=GROUP_SIZE,
        noise=0.4,
    )
    return model, recording


def _config(
    model: tuple[Path, Path],
    layout: dict[str, Any],
    *,
    microbatch_size: int = 8,
    recompute: str = "none",
    scoring: str = "separate",
    distributed: bool = True,
    **sections: dict[str, Any],
) -> RunConfig:
    return replay_config(
        *model,
        steps=STEPS,
        groups=GROUPS,
        group_size=GROUP_SIZE,
        layout=layout,
        train={
            "steps": STEPS,
            "prompts_per_step": GROUPS,
            "samples_per_prompt": GROUP_SIZE,
            "microbatch_size": microbatch_size,
            "recompute": recompute,
            "scoring": scoring,
        },
        optimizer={**OPTIMIZER, "distributed": distributed},
        **sections,
    )


@pytest.fixture(scope="module")
def references(dense: tuple[Path, Path], moe: tuple[Path, Path]) -> dict[str, Run]:
    """What one rank makes of each recording, by model path."""
    configs = [_config(model, {}) for model in (dense, moe)]
    (results,) = run_all(1, configs)
    first = results[1][0][0]
    # The batch must be off-policy and the experts unevenly used, or nothing would be compared.
    assert 0.5 < first["ess/step"] < 0.95
    assert first["router/load_max_over_mean_worst"] > first["router/load_max_over_mean"] > 1.1
    assert first["router/balance_loss"] > 1.0
    assert 0.3 < first["router/entropy_mean"] < 1.38  # log(4) = 1.386
    return {config.model.path: run for config, run in zip(configs, results, strict=True)}


def train_two_steps_then_move(
    pairs: list[tuple[RunConfig, RunConfig]], *, with_small_buckets: bool = False
) -> list[Run]:
    """Run on a rank: for each pair, train as the first says, resume after step 2 as the second."""
    results = []
    for number, pair in enumerate(pairs):
        for part, config in enumerate(pair):
            layout = ParallelLayout.for_world(config.layout, int(os.environ["WORLD_SIZE"]))
            context = initialize(layout, seed=0)
            policy = Policy(config, read_architecture(config.model.path), context)
            if with_small_buckets:
                assert any(has_padding_inside(chunk) for chunk in policy.model.chunks)
            run_dir = RunDir(Path(config.run.dir))
            store = CheckpointStore(run_dir, context, keep=2)
            first_step = 0
            if part == 1:
                state = store.load_latest(policy.model, policy.optimizer)
                policy.weight_version = state["weight_version"]
                first_step = state["step"]
                assert (first_step, policy.weight_version) == (2, 2)
            sink = Kept()
            train(
                config,
                policy,
                RecordedRollouts(ReplayRollouts(Path(str(config.rollout.replay_path)))),
                store,
                Observers(sinks=[sink], recorder=None, display=SilentDisplay()),
                identity={},
                first_step=first_step,
            )
            if part == 1:
                weights = {name: tensor.clone() for name, tensor in policy.named_tensors()}
                results.append((sink.steps, weights))
            elif context.rank == 0:  # as if the run had ended after two steps
                shutil.rmtree(run_dir.checkpoints / "step_3")
                replace_text(run_dir.checkpoints / "latest", "step_2")
            context.barrier()
            shut_down()
            if (number, part) != (len(pairs) - 1, 1):
                next_rendezvous()
    return results


def move_with_small_buckets(pairs: list[tuple[RunConfig, RunConfig]]) -> list[Run]:
    """Run on a rank: gradient buffers of many buckets, which models of this size do not have."""
    with pytest.MonkeyPatch.context() as patch:
        small = partial(parallel_model.DistributedDataParallelConfig, bucket_size=3000)
        patch.setattr(parallel_model, "DistributedDataParallelConfig", small)
        return train_two_steps_then_move(pairs, with_small_buckets=True)


def has_padding_inside(chunk: Any) -> bool:
    """Whether a buffer has padding that is not at its end."""
    gaps = []
    for buffer in chunk.buffers:
        spans = sorted((start, end) for start, end, _ in buffer.param_index_map.values())
        ends = [bucket.offset + bucket.grad_data.numel() for bucket in buffer.buckets[:-1]]
        gaps += [last not in {end for _, end in spans} for last in ends]
    return any(gaps)


def test_a_resumed_run_may_split_differently(
    dense: tuple[Path, Path],
    moe: tuple[Path, Path],
    references: dict[str, Run],
    tmp_path: Path,
) -> None:
    interleaved = {"pipeline": 2, "virtual_pipeline": 2}
    moves = [
        (dense, interleaved, {"data": 2}),
        (dense, {"pipeline": 2, "first_stage_layers": 3}, interleaved),
        (moe, {"data": 2, "expert": 2}, {**SEQUENCE, "expert_tensor": 2}),
        (moe, SEQUENCE, {"data": 2, "expert": 2}),
        (moe, interleaved, {**SEQUENCE, "expert": 2}),
    ]
    pairs = []
    for number, (model, *layouts) in enumerate(moves):
        sections = {
            "run": {"dir": str(tmp_path / str(number)), "record": False},
            "checkpoint": {"every": 2, "keep": 2},
        }
        first, second = (_config(model, layout, **sections) for layout in layouts)
        pairs.append((first, second))
    ranks = spawn(train_two_steps_then_move, 2, pairs, num_rendezvous=2 * len(pairs))
    _assert_as_references(ranks, pairs, references)


def test_state_of_many_buckets_moves(
    dense: tuple[Path, Path],
    moe: tuple[Path, Path],
    references: dict[str, Run],
    tmp_path: Path,
) -> None:
    pairs = []
    moves = [(dense, {"data": 2}), (moe, {"data": 2, "expert": 2})]
    for number, (model, layout) in enumerate(moves):
        sections = {
            "run": {"dir": str(tmp_path / str(number)), "record": False},
            "checkpoint": {"every": 2, "keep": 2},
        }
        config = _config(model, layout, **sections)
        pairs.append((config, config))
    ranks = spawn(move_with_small_buckets, 2, pairs, num_rendezvous=2 * len(pairs))
    _assert_as_references(ranks, pairs, references)


def _assert_as_references(
    ranks: list[list[Run]],
    pairs: list[tuple[RunConfig, RunConfig]],
    references: dict[str, Run],
) -> None:
    for results in ranks:
        for (_, config), run in zip(pairs, results, strict=True):
            metrics, weights = references[config.model.path]
            # The step after resuming, and the weights after it: Adam's state came along too.
            assert_same_update(run, (metrics[2:], weights), config.layout)
