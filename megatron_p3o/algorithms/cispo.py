"""CISPO: REINFORCE whose importance weight is clipped, so that no token loses its gradient.

    loss_t = - sg(clip(rho_t, 1 - low, 1 + high)) * A_t * logp_t

with rho = pi / b. Source: arXiv:2506.13585 (MiniMax-M1), equations 4 and 5. The paper clips only
from above: `clip_low` = 1, the default, makes the lower bound 0.

The difference to P3O is where the cap comes from: here a constant above 1, there the batch's ESS.
Left out: a KL term, as the paper; the unified formulation with a token mask (equation 6).
"""

from megatron_p3o.algorithms.correction import own_log_ratios
from megatron_p3o.algorithms.terms import sum_terms
from megatron_p3o.algorithms.trust import TrustStats
from megatron_p3o.config import CISPOObjective
from megatron_p3o.types import LossOutput, TokenStats


def cispo_loss(stats: TokenStats, trust: TrustStats, config: CISPOObjective) -> LossOutput:
    """CISPO loss of one microbatch, as a sum over its tokens.

    Returns:
        The loss sum; metrics `loss/score`, `loss/kl` (always 0) and `cispo/clip_fraction` (tokens
        whose weight is clipped; their gradient is not lost), all sums.
    """
    ratios = own_log_ratios(stats, config).detach().exp()
    weights = ratios.clamp(1 - config.clip_low, 1 + config.clip_high)
    return sum_terms(
        stats,
        config,
        score=-weights * stats.advantages * stats.logprobs,
        metrics={"cispo/clip_fraction": (weights != ratios).sum()},
    )
