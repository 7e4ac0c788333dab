"""The parts that losses share: policy ratios, the clipped surrogate, and from terms to sums."""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_p3o.algorithms.correction import CorrectedRatio, correction_weights
from megatron_p3o.algorithms.kl import guarded_expm1
from megatron_p3o.config import ObjectiveBase
from megatron_p3o.types import LossOutput, TokenStats


def guarded_ratios(log_ratios: Tensor) -> Tensor:
    """`exp(log_ratios)`, continued linearly above e^10 (see `kl`); gradient flows."""
    return 1 + guarded_expm1(log_ratios)


def clipped_surrogate(
    ratios: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic surrogate, as a loss (arXiv:1707.06347, equation 7).

        - min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

    Returns:
        `[T]` terms with gradient; `[T]` bool, where the clip sets the gradient to 0.
    """
    low, high = 1 - clip_low, 1 + clip_high
    clipped = ((advantages > 0) & (ratios > high)) | ((advantages < 0) & (ratios < low))
    return -torch.minimum(ratios * advantages, ratios.clamp(low, high) * advantages), clipped


def sum_terms(
    stats: TokenStats,
    config: ObjectiveBase,
    *,
    score: Tensor,
    kl: Tensor | None = None,
    corrected: CorrectedRatio = "mismatch",
    metrics: Mapping[str, Tensor] | None = None,
) -> LossOutput:
    """`sum_t token_weight_t * (c_t * score_t + kl_t - entropy_coefficient * H_t)`.

    Without tokens the sum is 0 and still part of the graph, so that a microbatch without response
    tokens joins every backward collective.

    Args:
        stats: the microbatch; `entropy` must be there when the coefficient is not 0.
        config: its correction gives c (1 when off), its entropy coefficient the bonus.
        score: `[T]` policy-gradient term, carries gradient.
        kl: `[T]` regulariser term, with its weight; None for none.
        corrected: the ratio that the correction is for.
        metrics: further sums, beside `loss/score`, `loss/kl` and those of the correction.
    """
    extra = dict(metrics or {})
    if config.correction.mode != "off":
        weights, correction_metrics = correction_weights(stats, config.correction, corrected)
        score = weights * score
        extra |= correction_metrics
    score_sum = (stats.token_weights * score).sum()
    kl_sum = torch.zeros_like(score_sum) if kl is None else (stats.token_weights * kl).sum()
    loss_sum = score_sum + kl_sum
    if config.entropy_coefficient:
        assert stats.entropy is not None, "an entropy bonus needs TokenStats.entropy"
        entropy_sum = (stats.token_weights * stats.entropy).sum()
        loss_sum = loss_sum - config.entropy_coefficient * entropy_sum
    return LossOutput(
        loss_sum=loss_sum,
        num_tokens=stats.num_tokens,
        metrics={"loss/score": score_sum.detach(), "loss/kl": kl_sum.detach(), **extra},
    )
