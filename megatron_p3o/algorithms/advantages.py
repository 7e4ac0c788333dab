"""Group-relative advantages: how much better a response was than others to the same prompt.

    group_zscore   A_i = (r_i - mean) / (std + 1e-6),  std with n - 1, as the P3O authors' code
    group_mean     A_i = r_i - mean
    none           A_i = r_i

The advantage of a response is given to each of its tokens.
"""

import statistics
from collections.abc import Sequence
from typing import Literal

AdvantageEstimator = Literal["group_zscore", "group_mean", "none"]

_STD_EPSILON = 1e-6  # FeynRL, the P3O authors' code


def group_advantages(
    rewards: Sequence[float | None], estimator: AdvantageEstimator
) -> list[float | None]:
    """Advantages of one prompt's samples.

    A reward of None (the verifier failed) takes no part in mean and standard deviation and gives
    None. Equal rewards give exact zeros, and so does a lone valid reward, which compares with
    nothing (`none` compares nothing, and keeps it).

    Args:
        rewards: `[G]` finite rewards of one group, or None.
        estimator: see the module.
    """
    if estimator == "none":
        return list(rewards)
    valid = [reward for reward in rewards if reward is not None]
    if len(valid) < 2:
        return [None if reward is None else 0.0 for reward in rewards]
    # `statistics.mean` is exact before its last rounding: equal rewards differ from it by 0.0.
    mean = statistics.mean(valid)
    scale = statistics.stdev(valid) + _STD_EPSILON if estimator == "group_zscore" else 1.0
    return [None if reward is None else (reward - mean) / scale for reward in rewards]
