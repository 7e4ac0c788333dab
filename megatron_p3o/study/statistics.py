"""Numbers about curves and seeds. Pure functions of lists; no files.

**Collapse.** Let m_t be the mean of the reward over the `window` steps that end at t, and b_t the
best m_s over s < t. A run has collapsed at the first step t from which on, to the end of the run,
every m_u (u >= t) is below (1 - drop) * b_t, where b_t > 0. A dip that is made good is no collapse.
m_t looks back, so a sudden drop is found up to `window` steps after it.

**Intervals** are 95 % intervals of the mean by Student's t. One run has none.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# 0.975 quantiles of Student's t for 1 to 30 degrees of freedom (any table; three decimals).
# fmt: off
_T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)
# fmt: on
_NORMAL_QUANTILE = 1.959964


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over runs.

    Example:
        Estimate(mean=0.8, half_width=0.1, count=3)  # 0.8 +- 0.1 over 3 seeds
    """

    mean: float
    half_width: float | None
    """Of the 95 % interval; None for one run."""
    count: int


@dataclass(frozen=True, slots=True)
class BandPoint:
    """A step of a curve over seeds."""

    step: int
    count: int
    """Runs that have a value at this step; only they are averaged."""
    mean: float
    low: float
    high: float
    std: float | None
    """With n - 1; None for one run."""


def t_quantile(degrees: int) -> float:
    """0.975 quantile of Student's t, within 0.0005."""
    assert degrees >= 1
    if degrees <= len(_T_QUANTILES):
        return _T_QUANTILES[degrees - 1]
    z = _NORMAL_QUANTILE
    # The first terms of the expansion in 1 / degrees (Abramowitz & Stegun 26.7.5).
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean and 95 % interval; None without values."""
    count = len(values)
    if not count:
        return None
    half_width = None
    if count > 1:
        half_width = t_quantile(count - 1) * statistics.stdev(values) / math.sqrt(count)
    return Estimate(statistics.fmean(values), half_width, count)


def band(curves: Sequence[Mapping[int, float]]) -> list[BandPoint]:
    """Curves of several seeds as one, over the runs that have each step.

    Args:
        curves: step -> value, of each run.
    """
    points = []
    for step in sorted({step for curve in curves for step in curve}):
        values = [curve[step] for curve in curves if step in curve]
        std = statistics.stdev(values) if len(values) > 1 else None
        mean = statistics.fmean(values)
        points.append(BandPoint(step, len(values), mean, min(values), max(values), std))
    return points


def window_means(curve: Mapping[int, float], window: int) -> dict[int, float]:
    """Step -> mean of the `window` values that end there; steps before the first full window have
    none."""
    steps, values = list(curve), list(curve.values())
    return {
        steps[end - 1]: statistics.fmean(values[end - window : end])
        for end in range(window, len(values) + 1)
    }


def first_mean(curve: Mapping[int, float], window: int) -> float | None:
    """Mean of the first `window` values, or of all if there are fewer; None without any."""
    values = list(curve.values())[:window]
    return statistics.fmean(values) if values else None


def final_mean(curve: Mapping[int, float], window: int) -> float | None:
    """Mean of the last `window` values, or of all if there are fewer; None without any."""
    values = list(curve.values())[-window:]
    return statistics.fmean(values) if values else None


def collapse_step(rewards: Mapping[int, float], *, window: int, drop: float) -> int | None:
    """Where a run has collapsed, by the rule at the top of this module; None if it has not.

    Args:
        rewards: step -> mean reward, in step order.
        window: steps that are averaged.
        drop: share of the best average that must be lost for good.
    """
    means = window_means(rewards, window)
    steps, values = list(means), list(means.values())
    best_before, best = [], -math.inf
    for value in values:
        best_before.append(best)
        best = max(best, value)
    found, best_after = None, -math.inf
    for index in range(len(values) - 1, 0, -1):
        best_after = max(best_after, values[index])
        if best_before[index] > 0 and best_after < (1 - drop) * best_before[index]:
            found = steps[index]
    return found
