"""Intervals and p-values that take prompts as independent and nothing else.

**Bootstrap** (Efron 1979): prompts are drawn again with replacement, all samples of a prompt
together; the interval is from the 2.5 % to the 97.5 % quantile of the resampled means.

**Sign-flip test**: if two models are alike on every prompt, each prompt's difference could as well
have the other sign. p is the share of sign patterns whose mean difference is at least as far from
0 as the one that was seen: all patterns for a few prompts that differ, else random ones, with the
one that was seen counted among them.

**Sign test**: the same for wins and losses alone, exact, without ties.

Random numbers come from numpy's RandomState, whose stream numpy promises never to change.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Shape legend: P prompts, R resamples.

NUM_RESAMPLES = 2000
NUM_FLIPS = 10_000
_EXACT_FLIPS = 13  # 2^13 patterns are fewer than NUM_FLIPS
_CHUNK_DRAWS = 4_000_000
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over prompts with its 95 % interval; one prompt has none.

    Example:
        Interval(0.5, 0.42, 0.58)
    """

    value: float
    low: float | None
    high: float | None

    def to_json(self) -> dict[str, float | None]:
        return {"value": self.value, "low": self.low, "high": self.high}


def bootstrap_mean(values: Sequence[float], *, seed: int) -> Interval:
    """Mean and percentile bootstrap interval.

    Args:
        values: one per prompt; not empty.
        seed: equal seeds and lengths draw the same prompts.
    """
    values_P = np.asarray(values, dtype=np.float64)
    size = len(values_P)
    mean = math.fsum(values) / size
    if size == 1:
        return Interval(mean, None, None)
    random = _random(seed)
    means_R = np.concatenate(
        [
            values_P[random.randint(0, size, size=(count, size))].mean(axis=1)
            for count in _chunks(NUM_RESAMPLES, size)
        ]
    )
    low, high = np.quantile(means_R, (0.025, 0.975))
    return Interval(mean, float(low), float(high))


def sign_flip_p_value(differences: Sequence[float], *, seed: int) -> float:
    """Two-sided p-value of a mean difference; 1 where nothing differs.

    Args:
        differences: one per prompt.
        seed: of the random patterns, where there are too many to try them all.
    """
    moved_P = np.asarray([d for d in differences if d], dtype=np.float64)
    size = len(moved_P)
    if not size:
        return 1.0
    seen = abs(moved_P.sum()) - _ROUNDING * np.abs(moved_P).sum()
    if size <= _EXACT_FLIPS:
        patterns = np.arange(2**size)[:, None] >> np.arange(size) & 1
        return float(np.mean(np.abs((1 - 2 * patterns) @ moved_P) >= seen))
    random = _random(seed)
    at_least = 1
    for count in _chunks(NUM_FLIPS, size):
        signs = 1 - 2 * random.randint(0, 2, size=(count, size))
        at_least += int(np.count_nonzero(np.abs(signs @ moved_P) >= seen))
    return at_least / (NUM_FLIPS + 1)


def sign_test_p_value(num_wins: int, num_losses: int) -> float:
    """Exact two-sided p-value of wins against losses under equal chances."""
    total = num_wins + num_losses
    tail = sum(math.comb(total, count) for count in range(min(num_wins, num_losses) + 1))
    return min(1.0, 2 * tail / 2**total)


def _random(seed: int) -> np.random.RandomState:
    # It takes 32 bits a word.
    return np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32])


def _chunks(total: int, size: int) -> list[int]:
    """Rows of `size` draws that fit into memory together; the stream is the same for any split."""
    rows = max(1, _CHUNK_DRAWS // size)
    return [min(rows, total - start) for start in range(0, total, rows)]
