"""Corrections for the gap between trainer and rollout engine, composable with every objective.

A stop-gradient weight c per token multiplies the score term; the KL and entropy terms keep theirs.
With r the ratio to be corrected for and [low, high] its band,

    truncate   c = min(r, high)                     truncated importance sampling (TIS)
    mask       c = r if low <= r <= high else 0     masked importance sampling (MIS); with low > 0
                                                    two-sided, as IcePop (arXiv:2510.18855)
    reject     c = 1 if low <= r <= high else 0     only drops what is outside the band

r is taken per token (`token`), as the product over the sequence's response tokens (`sequence`),
or as the geometric mean over them (`geometric`). TIS goes back to arXiv:1703.02702 and
arXiv:1802.01561 (V-trace); token and sequence forms for the gap between engines, and MIS, are
described in arXiv:2510.26788 and in verl's rollout correction.

Nothing is counted twice. REINFORCE and RLOO have no ratio of their own: r = pi / b. Objectives
with a ratio take r = p / b, p the proximal policy; under truncate and mask, which carry p / b,
their own ratio is then pi / p. reject carries nothing, so their ratio stays pi / b. P3O, P4O and
decoupled PPO already weigh by p / b inside their own weight: for them only reject is allowed.

Left out: dropped tokens still count in n, which keeps the divisor the same for every objective,
and in the trust statistics.
"""

from typing import Literal

import torch
from torch import Tensor

from megatron_p3o.config import CorrectionSection, ObjectiveBase
from megatron_p3o.types import TokenStats

CorrectedRatio = Literal["total", "mismatch"]
"""Which r is corrected for: pi / b, or p / b."""


def correction_weights(
    stats: TokenStats, config: CorrectionSection, ratio: CorrectedRatio
) -> tuple[Tensor, dict[str, Tensor]]:
    """`[T]` weights without gradient, and metrics; the mode must not be off.

    Returns:
        The weights; `correction/weight_mean` and `correction/outside_fraction` (tokens whose r
        lies outside the band), both sums.
    """
    assert config.high is not None
    ratios = _log_ratios(stats, config, ratio).detach().exp()
    # Written so that NaN is not outside: it must not be hidden by a zero.
    outside = ratios > config.high
    if config.low is not None:
        outside |= ratios < config.low
    if config.mode == "truncate":
        weights = ratios.clamp(max=config.high)
    elif config.mode == "mask":
        weights = torch.where(outside, 0.0, ratios)
    else:
        weights = (~outside).to(ratios.dtype)
    return weights, {
        "correction/weight_mean": weights.sum(),
        "correction/outside_fraction": outside.sum(),
    }


def own_log_ratios(stats: TokenStats, config: ObjectiveBase) -> Tensor:
    """`[T]` log-ratios of an objective with a ratio of its own; gradient flows.

    log(pi / b), or log(pi / p) where the correction carries p / b.
    """
    if not config.correction.carries_ratio:
        return stats.logprobs - stats.rollout_logprobs
    assert stats.proximal_logprobs is not None, "the correction needs proximal log-probs"
    return stats.logprobs - stats.proximal_logprobs


def _log_ratios(stats: TokenStats, config: CorrectionSection, ratio: CorrectedRatio) -> Tensor:
    if config.level == "token":
        if ratio == "total":
            return stats.logprobs - stats.rollout_logprobs
        assert stats.proximal_logprobs is not None, "the correction needs proximal log-probs"
        return stats.proximal_logprobs - stats.rollout_logprobs
    assert stats.sequences is not None, "the correction needs TokenStats.sequences"
    means = stats.sequences.log_ratios if ratio == "total" else stats.sequences.mismatch
    return means * stats.sequences.lengths if config.level == "sequence" else means
