import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_p3o.algorithms import group_advantages, overlong_penalty, token_weights
from megatron_p3o.algorithms.advantages import AdvantageEstimator

reward_lists = st.lists(st.none() | st.floats(-100, 100, width=32), max_size=12)


def test_zscore_hand_computed() -> None:
    # mean 0.5; n-1 std of (0, 0, 1, 1) = sqrt(4 * 0.25 / 3) = 0.57735.
    size = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert group_advantages([0.0, 0.0, 1.0, 1.0], "group_zscore") == pytest.approx(
        [-size, -size, size, size], rel=1e-14
    )


def test_mean_and_none_hand_computed() -> None:
    assert group_advantages([0.0, 1.0, 5.0], "group_mean") == [-2.0, -1.0, 3.0]
    assert group_advantages([0.0, 1.0, 5.0], "none") == [0.0, 1.0, 5.0]


def test_leave_one_out_hand_computed() -> None:
    # Means of the others: 3, 2.5, 0.5.
    assert group_advantages([0.0, 1.0, 5.0], "leave_one_out") == pytest.approx([-3.0, -1.5, 4.5])
    assert group_advantages([None, 3.0, 5.0], "leave_one_out") == pytest.approx([None, -2.0, 2.0])


@settings(deadline=None)
@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=12))
def test_leave_one_out_compares_with_the_mean_of_the_others(rewards: list[float]) -> None:
    got = group_advantages(rewards, "leave_one_out")
    for i, reward in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        assert got[i] == pytest.approx(reward - np.mean(others), rel=1e-9, abs=1e-9)


def test_failed_rewards_are_left_out_of_the_statistics() -> None:
    whole = group_advantages([1.0, 0.0, 4.0], "group_zscore")
    gaps = group_advantages([None, 1.0, None, 0.0, 4.0], "group_zscore")
    assert gaps == [None, whole[0], None, whole[1], whole[2]]
    assert group_advantages([None, 3.0, 5.0], "group_mean") == [None, -1.0, 1.0]
    assert group_advantages([None, 3.0], "none") == [None, 3.0]


@pytest.mark.parametrize("estimator", ["group_zscore", "group_mean", "leave_one_out"])
def test_a_lone_reward_compares_with_nothing(estimator: AdvantageEstimator) -> None:
    assert group_advantages([7.0], estimator) == [0.0]
    assert group_advantages([None, 7.0, None], estimator) == [None, 0.0, None]
    assert group_advantages([None, None], estimator) == [None, None]
    assert group_advantages([], estimator) == []


@settings(deadline=None)
@given(st.floats(-1e6, 1e6), st.integers(2, 16))
def test_equal_rewards_give_exact_zeros(reward: float, n: int) -> None:
    # 0.1 * 3 / 3 != 0.1 in floating point: a naive mean would leave 1e-11 here.
    for estimator in ("group_zscore", "group_mean", "leave_one_out"):
        assert group_advantages([reward] * n, estimator) == [0.0] * n


@settings(deadline=None)
@given(reward_lists)
def test_zscore_matches_numpy(rewards: list[float | None]) -> None:
    valid = np.array([r for r in rewards if r is not None], dtype=np.float64)
    got = group_advantages(rewards, "group_zscore")
    assert [a is None for a in got] == [r is None for r in rewards]
    if len(valid) >= 2:
        expected = (valid - valid.mean()) / (valid.std(ddof=1) + 1e-6)
        assert [a for a in got if a is not None] == pytest.approx(expected, rel=1e-9, abs=1e-7)


# --- overlong penalty


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (120, -1.0)],
)
def test_the_overlong_penalty_grows_over_the_buffer(length: int, penalty: float) -> None:
    assert overlong_penalty(length, max_length=100, buffer=20) == pytest.approx(penalty)
    assert overlong_penalty(length, max_length=100, buffer=0) == 0.0


# --- token weights


def test_token_mean_weighs_all_tokens_alike() -> None:
    assert token_weights([3, 0, 5], "token_mean") == [1.0, 1.0, 1.0]


def test_sequence_mean_hand_computed() -> None:
    # n = 8 tokens, 2 sequences with tokens: 8 / (2 * 2) and 8 / (2 * 6).
    assert token_weights([2, 0, 6], "sequence_mean") == [2.0, 0.0, 8 / 12]
    assert token_weights([0, 0], "sequence_mean") == [0.0, 0.0]
    assert token_weights([], "sequence_mean") == []


def test_constant_length_hand_computed() -> None:
    # n = 8 tokens, 3 sequences (the empty one counts), L = 10: 8 / 30 each; sum over n: 1 / 30.
    weights = token_weights([2, 0, 6], "constant_length", constant_length=10)
    assert weights == pytest.approx([8 / 30] * 3)
    assert token_weights([], "constant_length", constant_length=10) == []


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_sequence_mean_is_exact_under_any_split(lengths: list[int], data: st.DataObject) -> None:
    values = [np.linspace(i - 2, i + 1, n) ** 2 for i, n in enumerate(lengths)]
    with_tokens = [v.mean() for v in values if len(v)]
    weights = token_weights(lengths, "sequence_mean")
    # One sum per microbatch, added up and divided once by the step's token count.
    part_of = data.draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    partial = [0.0, 0.0, 0.0]
    for part, weight, v in zip(part_of, weights, values, strict=True):
        partial[part] += float((weight * v).sum())
    if with_tokens:
        assert sum(partial) / sum(lengths) == pytest.approx(np.mean(with_tokens), rel=1e-12)
        assert np.dot(weights, lengths) == pytest.approx(sum(lengths), rel=1e-12)
