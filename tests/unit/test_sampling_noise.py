"""Sampling noise: the same numbers for ever, evenly spread; and the token each number chooses."""

from collections import Counter
from fractions import Fraction
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_p3o.rollout import SampleNoise, invert_cdf

LARGEST_UNIFORM = 1 - 2.0**-53


def choose(weights: list[float], *uniforms: float) -> list[int]:
    """The tokens that some uniform numbers choose in one distribution."""
    rows = torch.tensor([weights] * len(uniforms))
    return invert(rows, torch.tensor(uniforms, dtype=torch.float64))


def invert(probs_BV: torch.Tensor, uniform_B: torch.Tensor) -> list[int]:
    return invert_cdf(probs_BV.cumsum(dim=1, dtype=torch.float64), uniform_B).tolist()


@pytest.mark.parametrize(
    ("seed", "step", "prompt_id", "sample_index", "position", "expected"),
    [
        (0, 0, "0", 0, 0, 0.6129193546624806),
        (0, 0, "0", 0, 1, 0.5387517481333512),
        (7, 3, "17", 2, 5, 0.8172258215355948),
        (2**63 - 1, 10**6, "a'b", 0, 0, 0.7334586636061996),
    ],
)
def test_golden_values(
    seed: int, step: int, prompt_id: str, sample_index: int, position: int, expected: float
) -> None:
    # Any change of these numbers changes every run of a given seed.
    assert SampleNoise(seed, step, prompt_id, sample_index).uniform(position) == expected


@pytest.mark.parametrize("varied", range(5))
def test_every_part_of_the_key_spreads_evenly(varied: int) -> None:
    num_draws, num_bins = 10_000, 100
    counts: Counter[int] = Counter()
    for value in range(num_draws):
        seed, step, prompt, sample_index, position = (
            value if part == varied else 5 for part in range(5)
        )
        uniform = SampleNoise(seed, step, str(prompt), sample_index).uniform(position)
        assert 0 <= uniform < 1
        counts[int(uniform * num_bins)] += 1
    expected = num_draws / num_bins
    chi_square = sum((counts[bin_] - expected) ** 2 / expected for bin_ in range(num_bins))
    assert 61 < chi_square < 149  # 0.1 % and 99.9 % quantiles at 99 degrees of freedom


def test_parts_of_the_key_do_not_run_together() -> None:
    keys = [
        (1, 12, "3", 4, 5),
        (11, 2, "3", 4, 5),
        (1, 2, "13", 4, 5),
        (1, 2, "1", 34, 5),
        (1, 2, "1", 3, 45),
        (1, 2, "1', 3", 4, 5),
    ]
    drawn = {SampleNoise(*key[:4]).uniform(key[4]) for key in keys}
    assert len(drawn) == len(keys)


def test_a_token_owns_the_interval_of_its_probability() -> None:
    uniforms = (0.0, 0.24, 0.25, 0.49, 0.5, 0.75, LARGEST_UNIFORM)
    assert choose([0.25, 0.25, 0.5], *uniforms) == [0, 0, 1, 1, 2, 2, 2]


def test_tokens_of_zero_probability_are_never_chosen() -> None:
    weights = [0.0, 0.0, 0.5, 0.0, 0.5, 0.0, 0.0]
    assert choose(weights, 0.0, 0.25, 0.5, 0.75, LARGEST_UNIFORM) == [2, 2, 4, 4, 4]


def test_rows_need_not_sum_to_one() -> None:
    uniforms = (0.0, 0.2, 0.3, LARGEST_UNIFORM)
    assert choose([3.0, 9.0], *uniforms) == choose([0.25, 0.75], *uniforms) == [0, 0, 1, 1]
    # The fp32 rounding of a softmax leaves sums just off 1 on either side.
    assert choose([0.25, 0.7499], LARGEST_UNIFORM) == [1]
    assert choose([0.25, 0.7501, 0.0], LARGEST_UNIFORM) == [1]


def test_the_largest_number_chooses_the_last_likely_token_for_any_total() -> None:
    # u * total rounds up to the total for many totals, where no token would be left.
    totals = torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 1e-3
    probs = torch.stack([totals / 3, totals, torch.zeros(1000)], dim=1)
    uniforms = torch.full((1000,), LARGEST_UNIFORM, dtype=torch.float64)
    assert invert(probs, uniforms) == [1] * 1000


def test_a_large_vocabularys_sum_does_not_move_tokens() -> None:
    # In float32, adding 2^-25 to 1 changes nothing, so the tail would have no interval at all.
    vocabulary = 2**17
    probs = torch.full((1, vocabulary), 2.0**-25)
    probs[0, 0] = 1.0
    total = 1 + (vocabulary - 1) * 2.0**-25
    for token in (1, 1000, vocabulary - 1):
        uniform = (1 + (token - 0.5) * 2.0**-25) / total
        assert invert(probs, torch.tensor([uniform], dtype=torch.float64)) == [token]


@given(
    weights=st.lists(st.integers(0, 1000), min_size=1, max_size=12).filter(any),
    numerator=st.integers(0, 1023),
)
def test_exact_arithmetic_agrees(weights: list[int], numerator: int) -> None:
    # Small integers over a power of two: float64 holds every product without rounding.
    target = Fraction(numerator, 1024) * sum(weights)
    expected = next(i for i, total in enumerate(accumulate(weights)) if total > target)
    assert choose([float(w) for w in weights], numerator / 1024) == [expected]
