"""Baselines behind the same signature as P3O: REINFORCE and GRPO's clipped surrogate.

    reinforce   - A_t * logp_t
    grpo        - min(rho_t * A_t, clip(rho_t, 1 - low, 1 + high) * A_t) + coefficient * k3_t

with rho = pi / b against the rollout engine's log-probs (PPO, arXiv:1707.06347; GRPO,
arXiv:2402.03300; separate clip ends, DAPO, arXiv:2503.14476). REINFORCE makes no correction for
off-policy tokens. GRPO's KL term is taken to the rollout policy, not to a frozen reference model.
Neither reads the trust statistics.
"""

import torch

from megatron_p3o.algorithms.kl import guarded_expm1, k3
from megatron_p3o.algorithms.terms import sum_terms
from megatron_p3o.algorithms.trust import TrustStats
from megatron_p3o.config import GRPOObjective, ReinforceObjective
from megatron_p3o.types import LossOutput, TokenStats


def reinforce_loss(stats: TokenStats, trust: TrustStats, config: ReinforceObjective) -> LossOutput:
    """Score-function loss of one microbatch, as a sum over its tokens.

    Returns:
        The loss sum; metrics `loss/score` and `loss/kl` (always 0), both sums.
    """
    return sum_terms(
        stats,
        score=-stats.advantages * stats.logprobs,
        kl=torch.zeros_like(stats.logprobs),
        entropy_coefficient=config.entropy_coefficient,
    )


def grpo_loss(stats: TokenStats, trust: TrustStats, config: GRPOObjective) -> LossOutput:
    """Clipped-surrogate loss of one microbatch, as a sum over its tokens.

    rho is continued linearly above e^10 (see `kl`): for A < 0 nothing else bounds its gradient.

    Returns:
        The loss sum; metrics `loss/score`, `loss/kl` (with its coefficient) and
        `grpo/clip_fraction` (tokens whose score gradient the clip sets to 0), all sums.
    """
    log_ratios = stats.logprobs - stats.rollout_logprobs
    ratios = 1 + guarded_expm1(log_ratios)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    clipped = ((stats.advantages > 0) & (ratios > high)) | ((stats.advantages < 0) & (ratios < low))
    return sum_terms(
        stats,
        score=-torch.minimum(ratios * stats.advantages, ratios.clamp(low, high) * stats.advantages),
        kl=config.kl_coefficient * k3(log_ratios),
        entropy_coefficient=config.entropy_coefficient,
        metrics={"grpo/clip_fraction": clipped.sum()},
    )
