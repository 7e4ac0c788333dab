"""One recorded batch, one update: the same for every layout and every split into microbatches."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from megatron_p3o.architecture import read_architecture
from megatron_p3o.config import RunConfig
from megatron_p3o.parallel.checkpoint import CheckpointStore
from megatron_p3o.parallel.layout import ParallelLayout
from megatron_p3o.parallel.setup import initialize, shut_down
from megatron_p3o.rollout import ReplayRollouts
from megatron_p3o.run_dir import RunDir
from megatron_p3o.trainer.display import SilentDisplay
from megatron_p3o.trainer.experience import RecordedRollouts
from megatron_p3o.trainer.loop import Observers, train
from megatron_p3o.trainer.policy import Policy
from tests.dist.harness import next_rendezvous, spawn
from tests.dist.matrix import Kept
from tests.dist.models import make_model, make_recording, replay_config

STEPS, GROUPS, GROUP_SIZE = 3, 4, 4
COMPARED = (
    "loss/total",
    "loss/score",
    "loss/kl",
    "ess/step",
    "ess/drift",
    "ess/mismatch",
    "ratio/mean",
    "ratio/std",
    "ratio/max",
    "mismatch/k3",
    "entropy/mean",
    "p3o/cap_fraction",
    "grad_norm",
)
Run = tuple[list[Mapping[str, float]], dict[str, torch.Tensor]]


def train_on_recording(configs: list[RunConfig]) -> list[Run]:
    """Run on a rank: every configuration in turn, on the ranks that are there."""
    results = []
    for config in configs:
        layout = ParallelLayout.for_world(config.layout, int(os.environ["WORLD_SIZE"]))
        context = initialize(layout, seed=0)
        policy = Policy(config, read_architecture(config.model.path), context)
        sink = Kept()
        train(
            config,
            policy,
            RecordedRollouts(ReplayRollouts(Path(str(config.rollout.replay_path)))),
            CheckpointStore(RunDir(Path(config.run.dir)), context, keep=1),
            Observers(sinks=[sink], recorder=None, display=SilentDisplay()),
            identity={},
            first_step=0,
        )
        weights = {name: tensor.clone() for name, tensor in policy.named_tensors()}
        results.append((sink.steps, weights))
        shut_down()
        if config is not configs[-1]:
            next_rendezvous()
    return results


def run_all(world_size: int, configs: list[RunConfig]) -> list[list[Run]]:
    """[rank][configuration]."""
    return spawn(train_on_recording, world_size, configs, num_rendezvous=len(configs))


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return _model_and_recording(tmp_path_factory.mktemp("tied"), "llama", tied=True)


def _model_and_recording(directory: Path, family: str, *, tied: bool) -> tuple[Path, Path]:
    model = make_model(directory / "model", family, tied=tied)
    recording = make_recording(
        directory / "samples.jsonl",
        model,
        steps=STEPS,
        groups=GROUPS,
        group_size=GROUP_SIZE,
        noise=0.4,
    )
    return model, recording


def _configs(
    model: tuple[Path, Path],
    layouts: list[dict[str, int]],
    microbatch_sizes: list[int],
    **sections: dict,
) -> list[RunConfig]:
    return [
        replay_config(
            *model,
            steps=STEPS,
            groups=GROUPS,
            group_size=GROUP_SIZE,
            layout=layout,
            train={
                "steps": STEPS,
                "prompts_per_step": GROUPS,
                "samples_per_prompt": GROUP_SIZE,
                "microbatch_size": size,
                "logprob_chunk_tokens": 7 * size,
            },
            **sections,
        )
        for layout in layouts
        for size in microbatch_sizes
    ]


def assert_same_update(
    run: Run,
    reference: Run,
    what: object,
    compared: tuple[str, ...] = COMPARED,
    absolute: float = 1e-7,
) -> None:
    for step, (got, want) in enumerate(zip(run[0], reference[0], strict=True)):
        for name in compared:
            close = pytest.approx(want[name], rel=1e-5, abs=absolute)
            assert got[name] == close, (what, step, name)
    assert run[1].keys() == reference[1].keys()
    for name, weight in run[1].items():
        error = (weight - reference[1][name]).abs().max() / reference[1][name].abs().max()
        assert error < 1e-5, (what, name, float(error))


def test_options_that_only_change_cost(tied_model: tuple[Path, Path]) -> None:
    plain = _configs(tied_model, [{"data": 2}], [2])
    recompute = [
        c.model_copy(update={"train": c.train.model_copy(update={"recompute": "full"})})
        for c in plain
    ]
    unsharded = _configs(
        tied_model,
        [{"data": 2}],
        [2],
        optimizer={"lr": 1e-3, "weight_decay": 0.1, "distributed": False},
    )
    fused = [
        c.model_copy(update={"train": c.train.model_copy(update={"scoring": "fused"})})
        for c in plain
    ]
    reference, *others = run_all(2, plain + recompute + unsharded + fused)[0]
    for label, run in zip(["recompute", "unsharded", "fused scoring"], others, strict=True):
        assert_same_update(run, reference, label)


def test_microbatch_scope_depends_on_the_split(tied_model: tuple[Path, Path]) -> None:
    configs = _configs(tied_model, [{}], [1, 2, 16], ess={"scope": "microbatch"})
    configs += _configs(tied_model, [{}], [2])
    by_one, by_two, whole, exact = run_all(1, configs)[0]
    # The logged ESS speaks of the whole step in either scope; what the loss used does not.
    assert by_one[0][0]["ess/step"] == pytest.approx(exact[0][0]["ess/step"], rel=1e-6)
    losses = [run[0][0]["loss/total"] for run in (by_one, by_two, whole, exact)]
    assert abs(losses[0] - losses[1]) > 1e-3
    assert abs(losses[1] - losses[3]) > 1e-3
    # One microbatch holds the whole step: both scopes agree.
    assert losses[2] == pytest.approx(losses[3], rel=1e-5)


OBJECTIVES: list[dict] = [
    # Each needs another optional input: whole sequences, proximal log-probs, entropy, reference.
    {
        "objective": {"name": "gspo", "clip_low": 0.05, "clip_high": 0.05},
        "reference": {"kl_coefficient": 0.1},
    },
    {
        "objective": {
            "name": "dr_grpo",
            "normalization_length": 4,
            "entropy_coefficient": 0.01,
            "correction": {"mode": "mask", "level": "sequence", "low": 0.5, "high": 2.0},
        },
    },
    {"objective": {"name": "p4o"}, "reference": {"kl_coefficient": 0.1, "kl_estimator": "k2"}},
]


def _objective_configs(
    model: tuple[Path, Path], layouts: list[tuple[dict[str, int], str]]
) -> list[RunConfig]:
    return [
        replay_config(
            *model,
            steps=STEPS,
            groups=GROUPS,
            group_size=GROUP_SIZE,
            layout=layout,
            train={
                "steps": STEPS,
                "prompts_per_step": GROUPS,
                "samples_per_prompt": GROUP_SIZE,
                "optimizer_steps_per_rollout": 2,
                "microbatch_size": 3,
                "scoring": scoring,
            },
            # Adam's eps 1e-8 makes full steps of gradients that are nothing but rounding; those
            # differ even between microbatch sizes on one rank. The same run without that.
            optimizer={"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-4},
            **sections,
        )
        for sections in OBJECTIVES
        for layout, scoring in layouts
    ]


def test_other_objectives_and_the_reference_are_invariant_too(
    tied_model: tuple[Path, Path],
) -> None:
    alone = _objective_configs(tied_model, [({}, "separate")])
    pairs = _objective_configs(
        tied_model,
        [({"data": 2}, "separate"), ({"pipeline": 2}, "separate"), ({"tensor": 2}, "fused")],
    )
    references = run_all(1, alone)[0]
    ranks = run_all(2, pairs)
    for results in ranks:
        for index, (config, run) in enumerate(zip(pairs, results, strict=True)):
            reference = references[index // 3]
            varying = ("time/", "ess/lag_", "ratio/p")
            compared = tuple(n for n in reference[0][0] if not n.startswith(varying))
            what = (config.objective.name, config.layout)
            # Terms of order one cancel in these losses.
            assert_same_update(run, reference, what, compared, absolute=2e-6)
            for name in ("ratio/p01", "ratio/p50", "ratio/p99"):  # a bin apart at most
                for got, want in zip(run[0], reference[0], strict=True):
                    assert got[name] == pytest.approx(want[name], rel=0.0101)
            # The recording's versions are 0, 1, 2 and the policy's 0, 2, 4: lags 0, 1, 2.
            for lag, (got, want) in enumerate(zip(run[0], reference[0], strict=True)):
                name = f"ess/lag_{lag}"
                assert got[name] == pytest.approx(want[name], rel=1e-5)
                assert got[name] == pytest.approx(got["ess/mismatch"], rel=1e-12)
    gspo, dr_grpo, p4o = references
    assert all(0 < step["gspo/clip_fraction"] < 1 for step in gspo[0])
    assert all(0 < step["correction/outside_fraction"] < 1 for step in dr_grpo[0])
    # At first the policy is its reference; the first optimizer step's estimate is 0, exactly.
    for run in (gspo, p4o):
        assert run[0][0]["reference/kl"] < run[0][-1]["reference/kl"]
        assert run[0][-1]["loss/reference_kl"] > 0
    assert all(step["ess/drift"] < 1 for step in p4o[0])


def test_several_optimizer_steps_per_batch_have_their_own_ess(
    tied_model: tuple[Path, Path],
) -> None:
    configs = [
        replay_config(
            *tied_model,
            steps=STEPS,
            groups=GROUPS,
            group_size=GROUP_SIZE,
            layout=layout,
            train={
                "steps": STEPS,
                "prompts_per_step": GROUPS,
                "samples_per_prompt": GROUP_SIZE,
                "optimizer_steps_per_rollout": 2,
                "microbatch_size": 3,
                "scoring": scoring,
            },
        )
        for layout, scoring in (
            ({"data": 2}, "separate"),
            ({"pipeline": 2}, "separate"),
            ({"tensor": 2}, "fused"),
        )
    ]
    ranks = run_all(2, configs)
    reference = ranks[0][0]
    # The second step's weights have moved from those that scored the batch first.
    assert all(step["ess/drift"] < 1 - 1e-9 for step in reference[0])
    assert [step["weight_version"] for step in reference[0]] == [0, 2, 4]
    for label, run in zip(["pipeline", "fused scoring"], ranks[0][1:], strict=True):
        assert_same_update(run, reference, label)
