"""Group-relative advantages: how much better a response was than others to the same prompt.

    group_zscore   A_i = (r_i - mean) / (std + 1e-6),  std with n - 1, as the P3O authors' code
    group_mean     A_i = r_i - mean
    leave_one_out  A_i = r_i - mean of the others = G / (G - 1) * (r_i - mean)
    none           A_i = r_i

The advantage of a response is given to each of its tokens. group_zscore is GRPO's
(arXiv:2402.03300), group_mean is Dr. GRPO's (arXiv:2503.20783), leave_one_out is RLOO's
(arXiv:2402.14740), the only one of these whose baseline does not depend on the response itself.

`overlong_penalty` shapes rewards before advantages are taken (DAPO).
"""

import statistics
from collections.abc import Sequence
from typing import Literal

AdvantageEstimator = Literal["group_zscore", "group_mean", "leave_one_out", "none"]

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
    scale = 1.0
    if estimator == "group_zscore":
        scale = statistics.stdev(valid) + _STD_EPSILON
    elif estimator == "leave_one_out":
        scale = (len(valid) - 1) / len(valid)
    return [None if reward is None else (reward - mean) / scale for reward in rewards]


def overlong_penalty(length: int, *, max_length: int, buffer: float) -> float:
    """DAPO's soft overlong punishment, in [-1, 0], to be added to the reward of a response.

        0                                          length <= max_length - buffer
        (max_length - buffer - length) / buffer    up to max_length
        -1                                         beyond

    Source: arXiv:2503.14476, equation 13.

    Args:
        length: response tokens.
        max_length: tokens at which generation is cut.
        buffer: tokens over which the penalty grows; 0 means no penalty at all.
    """
    if buffer == 0:
        return 0.0
    return max(-1.0, min(0.0, (max_length - buffer - length) / buffer))
