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


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[Mapping[str, float]] = []

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(dict(metrics))

    def close(self) -> None:
        pass


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


@pytest.fixture(scope="module")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return _model_and_recording(tmp_path_factory.mktemp("untied"), "qwen3", tied=False)


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


def assert_same_update(run: Run, reference: Run, what: object) -> None:
    for step, (got, want) in enumerate(zip(run[0], reference[0], strict=True)):
        for name in COMPARED:
            assert got[name] == pytest.approx(want[name], rel=1e-5, abs=1e-7), (what, step, name)
    assert run[1].keys() == reference[1].keys()
    for name, weight in run[1].items():
        error = (weight - reference[1][name]).abs().max() / reference[1][name].abs().max()
        assert error < 1e-5, (what, name, float(error))


LAYOUTS = {
    1: [{}],
    2: [{"tensor": 2}, {"pipeline": 2}, {"data": 2}],
    4: [
        {"tensor": 2, "pipeline": 2},
        {"tensor": 2, "data": 2},
        {"pipeline": 2, "data": 2},
        {"data": 4},
    ],
}


@pytest.mark.parametrize("kind", ["tied_model", "untied_model"])
def test_update_is_the_same_for_every_layout_and_microbatch_size(
    kind: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    everything = GROUPS * GROUP_SIZE
    runs: list[tuple[object, Run]] = []
    for world_size, layouts in LAYOUTS.items():
        configs = _configs(model, layouts, [1, 2, everything])
        ranks = run_all(world_size, configs)
        labels = [(c.layout, c.train.microbatch_size) for c in configs]
        for results in ranks:  # every rank reports the same metrics and weights
            runs += zip(labels, results, strict=True)
    _, reference = runs[0]
    # The batch must be off-policy, or the comparison would not exercise the ESS.
    assert all(0.5 < step["ess/step"] < 0.95 for step in reference[0])
    assert all(step["p3o/cap_fraction"] > 0.1 for step in reference[0])
    for label, run in runs[1:]:
        assert_same_update(run, reference, label)


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
