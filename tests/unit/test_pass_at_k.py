"""pass@k against every subset, intervals and p-values against cases done by hand."""

import itertools
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_p3o.evaluation.items import EvalItem
from megatron_p3o.evaluation.pass_at_k import pass_at_k
from megatron_p3o.evaluation.resampling import (
    bootstrap_mean,
    sign_flip_p_value,
    sign_test_p_value,
)
from megatron_p3o.evaluation.summary import figures, metrics


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 3 of 6 pairs hold the correct one
        (4, 2, 2, 5 / 6),
        (5, 2, 3, 9 / 10),  # one of 10 triples holds none
        (4, 0, 4, 0.0),
        (4, 1, 4, 1.0),
        (16, 16, 1, 1.0),
    ],
)
def test_by_hand(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == expected


@given(st.data())
def test_it_is_the_mean_over_all_subsets(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 8))
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    correct = [index < c for index in range(n)]
    subsets = list(itertools.combinations(correct, k))
    assert pass_at_k(n, c, k) == sum(map(any, subsets)) / len(subsets)


@given(st.integers(1, 3000), st.data())
def test_large_numbers_stay_exact_and_in_order(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    found = pass_at_k(n, c, k)
    assert 0 <= found <= 1
    assert pass_at_k(n, c, 1) == c / n
    assert pass_at_k(n, min(c, 1), k) == (k / n if c else 0)  # no digit is lost near 0
    assert found <= pass_at_k(n, min(c + 1, n), k) and found <= pass_at_k(n, c, min(k + 1, n))


def item(*rewards: float | None, length: int = 2, reason: str = "stop") -> EvalItem:
    n = len(rewards)
    return EvalItem(
        prompt_id="0",
        prompt="1+1=",
        answer="2",
        responses=("2",) * n,
        rewards=rewards,
        reward_errors=tuple("no verdict" if r is None else None for r in rewards),
        lengths=(length,) * n,
        finish_reasons=(reason,) * n,
    )


def test_figures_by_hand() -> None:
    items = [item(1.0, 0.0), item(0.5, 0.4, length=4), item(None, None, length=6, reason="length")]
    found = figures(items, (1, 2), threshold=0.5, seed=0)
    assert found.reward_mean is not None
    assert found.reward_mean.value == pytest.approx((0.5 + 0.45) / 2)  # the failed one is left out
    assert found.pass_at[1].value == pytest.approx((1 / 2 + 1 / 2 + 0) / 3)  # and here it counts
    assert found.pass_at[2].value == pytest.approx(2 / 3)
    assert (found.length_mean, found.num_tokens, found.num_failed_rewards) == (4, 24, 2)
    assert found.length_quantiles["p50"] == 4 and found.length_quantiles["max"] == 6
    assert found.truncated_fraction == pytest.approx(1 / 3)
    strict = figures(items, (1,), threshold=1.0, seed=0)
    assert strict.pass_at[1].value == pytest.approx(1 / 6)
    in_training = metrics(items, (1, 2), 0.5)
    assert in_training == {
        "eval/reward_mean": found.reward_mean.value,
        "eval/pass_at_1": found.pass_at[1].value,
        "eval/pass_at_2": found.pass_at[2].value,
        "eval/length_mean": 4,
        "eval/truncated_fraction": pytest.approx(1 / 3),
        "eval/failed_fraction": pytest.approx(1 / 3),
    }


def test_without_any_reward_there_is_no_mean() -> None:
    found = figures([item(None)], (1,), threshold=0.5, seed=0)
    assert found.reward_mean is None and found.pass_at[1].value == 0
    assert found.to_json()["reward_mean"] is None
    assert "eval/reward_mean" not in metrics([item(None)], (1,), 0.5)


def test_bootstrap_is_seeded_and_of_the_right_width() -> None:
    stream = random.Random(1)
    values = [float(stream.random() < 0.3) for _ in range(400)]
    found = bootstrap_mean(values, seed=5)
    assert found == bootstrap_mean(values, seed=5) != bootstrap_mean(values, seed=6)
    assert found.low is not None and found.high is not None
    half_width = 1.96 * statistics.pstdev(values) / 20
    assert found.low == pytest.approx(found.value - half_width, abs=0.1 * half_width)
    assert found.high == pytest.approx(found.value + half_width, abs=0.1 * half_width)
    single = bootstrap_mean([0.25], seed=0)
    assert (single.value, single.low, single.high) == (0.25, None, None)
    assert bootstrap_mean([1.0] * 7, seed=2**40).low == 1


def test_sign_flips_by_hand() -> None:
    # 8 patterns: |sum| >= 6 for +++ and --- alone.
    assert sign_flip_p_value([1.0, 2.0, 3.0, 0.0], seed=0) == 2 / 8
    # |sum| = 0 is reached by all.
    assert sign_flip_p_value([1.0, -1.0], seed=0) == 1
    assert sign_flip_p_value([0.0, 0.0], seed=0) == 1
    # Equal but for rounding counts as equal.
    assert sign_flip_p_value([0.1, 0.2, -0.3 + 1e-17], seed=0) == 1


def test_random_flips_agree_with_the_binomial() -> None:
    changes = [1.0] * 22 + [-1.0] * 9
    found = sign_flip_p_value(changes, seed=3)
    assert found == sign_flip_p_value(changes, seed=3)
    assert found == pytest.approx(sign_test_p_value(22, 9), abs=0.01)


@pytest.mark.parametrize(
    ("wins", "losses", "expected"),
    [(0, 0, 1.0), (1, 1, 1.0), (5, 0, 2 / 32), (0, 5, 2 / 32), (8, 2, 2 * 56 / 1024)],
)
def test_sign_test(wins: int, losses: int, expected: float) -> None:
    assert sign_test_p_value(wins, losses) == expected
