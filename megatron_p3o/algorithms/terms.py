"""The part that all losses share: from per-token terms to sums."""

from collections.abc import Mapping

from torch import Tensor

from megatron_p3o.types import LossOutput, TokenStats


def sum_terms(
    stats: TokenStats,
    *,
    score: Tensor,
    kl: Tensor,
    entropy_coefficient: float,
    metrics: Mapping[str, Tensor] | None = None,
) -> LossOutput:
    """`loss_sum = sum_t token_weight_t * (score_t + kl_t - entropy_coefficient * H_t)`.

    Without tokens the sum is 0 and still part of the graph, so that a microbatch without response
    tokens joins every backward collective.

    Args:
        stats: the microbatch; `entropy` must be there when the coefficient is not 0.
        score: `[T]` policy-gradient term, carries gradient.
        kl: `[T]` regulariser term, with its weight.
        entropy_coefficient: weight of the entropy bonus.
        metrics: further sums, beside `loss/score` and `loss/kl`.
    """
    score_sum = (stats.token_weights * score).sum()
    kl_sum = (stats.token_weights * kl).sum()
    loss_sum = score_sum + kl_sum
    if entropy_coefficient:
        assert stats.entropy is not None, "an entropy bonus needs TokenStats.entropy"
        loss_sum = loss_sum - entropy_coefficient * (stats.token_weights * stats.entropy).sum()
    return LossOutput(
        loss_sum=loss_sum,
        num_tokens=stats.num_tokens,
        metrics={"loss/score": score_sum.detach(), "loss/kl": kl_sum.detach(), **(metrics or {})},
    )
