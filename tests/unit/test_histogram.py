import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_p3o.algorithms import NUM_BINS, ratio_counts, ratio_quantile
from megatron_p3o.algorithms.histogram import BIN_WIDTH, NUM_SIDE_BINS


def counts_of(*log_ratios: float) -> torch.Tensor:
    return ratio_counts(torch.tensor(log_ratios, dtype=torch.float64))


@given(
    st.lists(st.floats(-10, 10), min_size=1, max_size=60), st.sampled_from([0.01, 0.1, 0.5, 0.99])
)
def test_a_quantile_is_exact_up_to_the_stated_resolution(
    log_ratios: list[float], quantile: float
) -> None:
    got = math.log(ratio_quantile(counts_of(*log_ratios), quantile))
    want = np.quantile(log_ratios, quantile, method="inverted_cdf")
    assert abs(got - want) <= BIN_WIDTH / 2 + 1e-9


@given(st.lists(st.floats(-20, 20), max_size=30), st.integers(0, 30))
def test_counts_add_over_any_split(log_ratios: list[float], cut: int) -> None:
    parts = counts_of(*log_ratios[:cut]) + counts_of(*log_ratios[cut:])
    assert torch.equal(parts, counts_of(*log_ratios))
    assert parts.sum() == len(log_ratios)


def test_on_policy_is_exactly_one() -> None:
    counts = counts_of(0.0, 0.0, 1e-4, -1e-4)
    assert [ratio_quantile(counts, q) for q in (0.01, 0.5, 1.0)] == [1.0, 1.0, 1.0]


def test_the_ends_hold_what_lies_beyond_and_nan_counts_nowhere() -> None:
    counts = counts_of(-math.inf, -50.0, 50.0, math.inf, math.nan)
    assert counts.numel() == NUM_BINS
    assert (counts[0], counts[-1], counts.sum()) == (2, 2, 4)
    end = NUM_SIDE_BINS * BIN_WIDTH
    assert ratio_quantile(counts, 0.5) == pytest.approx(math.exp(-end))
    assert ratio_quantile(counts, 0.51) == pytest.approx(math.exp(end))


def test_hand_computed() -> None:
    # Ratios 0.5, 1, 1, 2: the median is the second, the 76 % quantile the fourth.
    counts = counts_of(math.log(0.5), 0.0, 0.0, math.log(2))
    assert ratio_quantile(counts, 0.25) == pytest.approx(0.5, rel=0.005)
    assert ratio_quantile(counts, 0.5) == 1.0
    assert ratio_quantile(counts, 0.75) == 1.0
    assert ratio_quantile(counts, 0.76) == pytest.approx(2.0, rel=0.005)
