"""One batch, one answer: every layout gives one rank's loss, trust, gradients and weights."""

from pathlib import Path

import pytest

from megatron_p3o.architecture import read_architecture
from megatron_p3o.splitting import check_layout
from tests.dist import matrix
from tests.dist.matrix import CASES, Case, Errors, measure, world_size


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Errors]:
    return dict(enumerate(measure(CASES, tmp_path_factory.mktemp("matrix"))))


def test_the_matrix_covers_every_axis_and_world_size() -> None:
    assert {world_size(case) for case in CASES} == {1, 2, 4, 8}
    assert sum(world_size(case) > 1 for case in CASES) >= 24
    axes = {axis for case in CASES for axis in case.layout}
    assert axes >= {
        *("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor", "data"),
        *("sequence_parallel", "first_stage_layers", "account_for_embedding", "account_for_loss"),
    }
    for model in matrix.MODELS:
        of_model = [case for case in CASES if case.model == model]
        assert world_size(of_model[0]) == 1
        assert {case.sharded for case in of_model} == {True, False}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: label(CASES[i]))
def test_every_layout_gives_one_ranks_update(index: int, measured: dict[int, Errors]) -> None:
    errors = measured[index]
    assert errors.worst() < 1e-5, errors
    assert (errors.gradients is None) == CASES[index].sharded


def label(case: Case) -> str:
    parts = [case.model, *(f"{k}={v}" for k, v in (*case.layout.items(), *case.train.items()))]
    return " ".join([*parts, "sharded" if case.sharded else ""]).strip()


def test_the_batch_exercises_the_objective(tmp_path: Path) -> None:
    """Were it on-policy or its experts evenly used, nothing would be compared."""
    cases = [case for case in CASES if not case.layout and case.train == matrix.WHOLE]
    assert len(cases) == len(matrix.MODELS)
    configs = matrix.make_configs(cases, tmp_path)
    for config in configs:
        check_layout(read_architecture(config.model.path), config.layout)
    (outcomes,) = matrix.spawn(matrix.train_all, 1, configs, num_rendezvous=len(configs))
    for case, (_, steps, _) in zip(cases, outcomes, strict=True):
        assert all(0.5 < step["ess/step"] < 0.95 for step in steps)
        assert all(step["p3o/cap_fraction"] > 0.1 for step in steps)
        if "experts" in case.model:
            assert steps[0]["router/load_max_over_mean_worst"] > 1.1
            assert 0.3 < steps[0]["router/entropy_mean"] < 1.38  # log(4) = 1.386
        if case.model in matrix.REPLAYED:
            # Of 2 random experts of 4, half are among the router's own 2.
            assert 0.4 < steps[0]["router/replay_disagreement"] < 0.6
        else:
            assert "router/replay_disagreement" not in steps[0]
