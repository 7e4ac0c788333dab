"""KL to a frozen reference model, as a term that any objective takes beside its own.

    loss gains   coefficient * 1/n * sum_t w_t * KL_t        KL_t: an estimator of `kl`, of
                                                             l_t = logp_t - logref_t

with w the token weights of the normalisation. Gradient flows through logp; the reference has none.
Source: the KL term of RLHF (arXiv:1909.08593), as a loss term with k3 as in GRPO
(arXiv:2402.03300).

Left out: an importance weight. The tokens come from the rollout policy, not from pi, so for a
stale batch the estimate is of the KL under the rollout policy; `k3_importance` does not mend that
either, since its weight is pi / reference. Nor is the KL taken off the reward before advantages.
"""

from dataclasses import replace

from megatron_p3o.algorithms.kl import KL_ESTIMATORS
from megatron_p3o.config import ReferenceSection
from megatron_p3o.types import LossOutput, TokenStats


def add_reference_kl(output: LossOutput, stats: TokenStats, config: ReferenceSection) -> LossOutput:
    """A loss's output with the reference KL added, unchanged where the coefficient is 0.

    Adds the metrics `loss/reference_kl` (with its coefficient and token weights) and
    `reference/kl` (the plain estimate), both sums over tokens.
    """
    if not config.kl_coefficient:
        return output
    assert stats.reference_logprobs is not None, "a reference KL needs reference log-probs"
    kl = KL_ESTIMATORS[config.kl_estimator](stats.logprobs - stats.reference_logprobs)
    term = config.kl_coefficient * (stats.token_weights * kl).sum()
    return replace(
        output,
        loss_sum=output.loss_sum + term,
        metrics={
            **output.metrics,
            "loss/reference_kl": term.detach(),
            "reference/kl": kl.detach().sum(),
        },
    )
