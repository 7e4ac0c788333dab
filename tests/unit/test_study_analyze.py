"""Statistics of curves and seeds, against values worked out by hand."""

import math
import statistics
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_p3o.study.analyze import compare, missing_metrics, summarize_arms, summarize_run
from megatron_p3o.study.config import CollapseRule
from megatron_p3o.study.runs import Run, read_run
from megatron_p3o.study.statistics import (
    BandPoint,
    Estimate,
    band,
    collapse_step,
    estimate,
    final_mean,
    first_mean,
    t_quantile,
    window_means,
)
from megatron_p3o.study.status import Attempt
from tests.unit.studies import write_run

RULE = CollapseRule(window=2, drop=0.5)


def curve(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


def make_run(
    rewards: list[float],
    *,
    labels: Mapping[str, str] | None = None,
    seed: int = 0,
    steps: int | None = None,
    message: str = "",
    **metrics: list[float],
) -> Run:
    """A run with more metrics, whose names have __ for /."""
    named = {name.replace("__", "/"): values for name, values in metrics.items()}
    records = {
        step: {"step": step, "reward/mean": reward, **{n: v[step] for n, v in named.items()}}
        for step, reward in enumerate(rewards)
    }
    attempt = Attempt(arm="a", seed=seed, exit_code=1, seconds=1.0, message=message)
    return Run(
        name=f"seed{seed}",
        labels=labels or {"objective": "p3o"},
        seed=seed,
        tree={"train": {"steps": steps or len(rewards)}},
        records=records,
        attempt=attempt if message else None,
    )


def test_means_over_windows() -> None:
    values = curve(0.0, 1.0, 2.0, 6.0)
    assert window_means(values, 2) == {1: 0.5, 2: 1.5, 3: 4.0}
    assert window_means(values, 5) == {}
    assert (first_mean(values, 2), final_mean(values, 2)) == (0.5, 4.0)
    assert (first_mean(values, 9), final_mean(values, 9)) == (2.25, 2.25)
    assert (first_mean({}, 2), final_mean({}, 2)) == (None, None)


def test_t_quantiles() -> None:
    assert (t_quantile(1), t_quantile(2), t_quantile(30)) == (12.706, 4.303, 2.042)
    # From a table of four decimals; the series takes over at 31.
    for degrees, expected in ((31, 2.0395), (40, 2.0211), (60, 2.0003), (120, 1.9799)):
        assert t_quantile(degrees) == pytest.approx(expected, abs=1e-4)


def test_an_estimate_is_a_mean_with_its_interval() -> None:
    # Standard deviation 1, so 4.303 / sqrt(3).
    assert estimate([1.0, 2.0, 3.0]) == Estimate(2.0, pytest.approx(2.48434, abs=1e-5), 3)
    assert estimate([0.4]) == Estimate(0.4, None, 1)
    assert estimate([]) is None


def test_a_band_is_over_the_runs_that_have_the_step() -> None:
    assert band([curve(1.0, 2.0, 9.0), curve(3.0, 2.0)]) == [
        BandPoint(0, 2, 2.0, 1.0, 3.0, pytest.approx(math.sqrt(2.0))),
        BandPoint(1, 2, 2.0, 2.0, 2.0, 0.0),
        BandPoint(2, 1, 9.0, 9.0, 9.0, None),
    ]
    assert band([]) == []


@pytest.mark.parametrize(
    ("rewards", "step"),
    [
        # Window 2. Means: .5 1 1 .5 0 0; .5 is not below half of 1, 0 is.
        ([0, 1, 1, 1, 0, 0, 0], 5),
        # One value that is worse: mean .4 at step 4 already.
        ([0, 1, 1, 1, -0.2, 0, 0], 4),
        ([0, 1, 1, 0, 0, 1, 1], None),  # made good
        ([0, 1, 1, 0, 0, 1, 0], None),  # ends at .5
        ([0, 1, 1, 0, 0, 1, 0, 0], 7),  # the dip before the recovery is not the collapse
        ([0.2, 0.1, 0.1, 0.1], None),  # .15 .1 .1
        ([-1, -1, -4, -4], None),  # no best above 0 to lose
        ([1], None),
        ([1, 0], None),  # one window has none before it
        ([], None),
    ],
)
def test_collapse(rewards: list[float], step: int | None) -> None:
    assert collapse_step(curve(*rewards), window=2, drop=0.5) == step


rewards_ = st.lists(st.floats(0, 1), min_size=1, max_size=60)


@given(rewards=rewards_, window=st.integers(1, 12), drop=st.floats(0.05, 0.95))
def test_a_curve_that_never_falls_does_not_collapse(
    rewards: list[float], window: int, drop: float
) -> None:
    assert collapse_step(curve(*sorted(rewards)), window=window, drop=drop) is None


@given(good=st.integers(1, 40), window=st.integers(1, 12), drop=st.floats(0.05, 0.95))
def test_a_drop_to_nothing_for_ever_is_found(good: int, window: int, drop: float) -> None:
    good += window  # a full window before the drop
    values = curve(*([1.0] * good), *([0.0] * window))
    # With j zeros in the window the mean is 1 - j / window.
    zeros = next(
        j
        for j in range(1, window + 1)
        if statistics.fmean([1.0] * (window - j) + [0.0] * j) < 1 - drop
    )
    assert collapse_step(values, window=window, drop=drop) == good + zeros - 1


@given(rewards=rewards_, window=st.integers(1, 6), drop=st.floats(0.05, 0.95))
def test_collapse_is_what_the_rule_says(rewards: list[float], window: int, drop: float) -> None:
    means = window_means(curve(*rewards), window)
    expected = None
    for step in means:
        before = [value for other, value in means.items() if other < step]
        after = [value for other, value in means.items() if other >= step]
        best = max(before, default=0.0)
        if best > 0 and all(value < (1 - drop) * best for value in after):
            expected = step
            break
    assert collapse_step(curve(*rewards), window=window, drop=drop) == expected


def test_a_run_in_numbers() -> None:
    run = make_run(
        [0.0, 0.2, 0.8, 0.6],
        ess__step=[1.0, 0.9, 0.5, 0.7],
        mismatch__k3=[0.1, 0.2, 0.3, 0.4],
        ratio__max=[1.0, 9.0, 2.0, 2.0],
        grad_norm=[1.0, math.inf, 3.0, 2.0],
    )
    summary = summarize_run(run, RULE)
    expected = {
        "reward_first": 0.1,
        "reward_final": 0.7,
        "reward_best": 0.7,
        "final_over_best": 1.0,
        "ess_final": 0.6,
        "ess_mean": 0.775,
        "ess_min": 0.5,
        "mismatch_k3": 0.25,
        "mismatch_abs_logprob": None,
        "ratio_p99": None,
        "ratio_max": 9.0,
        "grad_norm_max": 3.0,  # of the finite ones
        "entropy_final": None,
        "length_final": None,
    }
    assert summary.values == {
        name: None if value is None else pytest.approx(value) for name, value in expected.items()
    }
    assert (summary.collapsed_at, summary.state) == (None, "complete")


def test_a_run_that_met_nan_has_collapsed_where_it_stopped() -> None:
    said = "p3o: non-finite policy ratio"
    summary = summarize_run(make_run([1.0, 1.0, 1.0], steps=9, message=said), RULE)
    assert (summary.collapsed_at, summary.state, summary.is_over) == (3, "non-finite", True)
    # Its reward had gone before.
    summary = summarize_run(make_run([1.0, 1.0, 0.0, 0.0], steps=9, message=said), RULE)
    assert summary.collapsed_at == 3
    summary = summarize_run(make_run([], steps=9, message=said), RULE)
    assert summary.collapsed_at == 0


def test_an_arm_is_the_mean_of_its_complete_runs() -> None:
    runs = [
        make_run([0.0, 0.0, 0.4, 0.4], seed=0),
        make_run([0.0, 1.0, 1.0, 0.0, 0.0], seed=1),
        make_run([0.9, 0.9], seed=2, steps=4),
        make_run([0.9, 0.9], seed=3, steps=4, message="p3o: no server"),
        make_run([0.9, 0.9], seed=4, steps=4, message="p3o: gradient norm is nan"),
    ]
    (arm,) = summarize_arms([summarize_run(run, RULE) for run in runs])
    assert [summary.state for summary in arm.runs] == [
        "complete",
        "complete",
        "incomplete",
        "failed",
        "non-finite",
    ]
    # 0.4 and 0.0: standard deviation 0.2828, over sqrt(2) is 0.2, times 12.706.
    assert arm.values["reward_final"] == Estimate(pytest.approx(0.2), pytest.approx(2.5412), 2)
    assert (arm.num_complete, arm.num_over, arm.collapse_steps) == (2, 3, (2, 4))


def test_differences_are_paired_by_seed() -> None:
    def run(serving: str, objective: str, seed: int, k3: float, steps: int = 2) -> Run:
        labels = {"objective": objective, "serving": serving}
        rewards = [0.5, 0.5 + k3]
        return make_run(rewards, labels=labels, seed=seed, steps=steps, mismatch__k3=[k3, k3])

    runs = [
        run("exact", "p3o", 0, 0.1),
        run("exact", "p3o", 1, 0.2),
        run("exact", "p3o", 2, 0.9),
        run("fp8", "p3o", 0, 0.4),
        run("fp8", "p3o", 1, 0.7),
        run("fp8", "p3o", 2, 7.0, steps=3),  # incomplete
        run("fp8", "grpo", 0, 0.4),  # nothing to compare it with
    ]
    arms = summarize_arms([summarize_run(each, RULE) for each in runs])
    found = compare(arms, {"serving": "exact"})
    assert [(each.arm, each.baseline_arm, each.quantity) for each in found] == [
        ("p3o__fp8", "p3o__exact", "mismatch_k3"),
        ("p3o__fp8", "p3o__exact", "reward_final"),
    ]
    # 0.3 and 0.5: standard deviation 0.14142, over sqrt(2) is 0.1, times 12.706.
    assert found[0].difference == Estimate(pytest.approx(0.4), pytest.approx(1.2706), 2)
    assert found[1].difference.mean == pytest.approx(0.2)
    assert compare(arms, {"objective": "p3o"})[0].arm == "grpo__fp8"
    assert compare(arms, {}) == []


def test_metrics_that_runs_do_not_have(tmp_path: Path) -> None:
    with_ess = read_run(
        write_run(tmp_path / "a", [0.1, 0.2], metrics={"ess/step": [1.0, 1.0]}), name="a"
    )
    without = read_run(write_run(tmp_path / "b", [0.1, 0.2]), name="b")
    found = missing_metrics([with_ess, without])
    assert found["ess/step"] == ["b"]
    assert found["grad_norm"] == ["a", "b"]
    assert "reward/mean" not in found
