"""Baselines behind the same signature as P3O: REINFORCE, RLOO and the clipped surrogates.

    reinforce, rloo        - A_t * logp_t
    grpo, dapo, dr_grpo    - min(rho_t * A_t, clip(rho_t, 1 - low, 1 + high) * A_t)
                           + coefficient * k3_t                              (grpo only)

with rho = pi / b against the rollout engine's log-probs, or pi / p under a correction that carries
p / b (see `correction`). Within a line the objectives share the loss; what else makes them what
they are is set by the defaults of their configuration:

    name        advantage       normalisation     besides                       source
    reinforce   z-score         token mean                                      Williams 1992
    rloo        leave-one-out   token mean                                      arXiv:2402.14740
    grpo        z-score         token mean        optional KL                   arXiv:2402.03300
    dapo        z-score         token mean        low 0.2, high 0.28,           arXiv:2503.14476
                                                  overlong penalty
    dr_grpo     r - mean        constant length                                 arXiv:2503.20783

The clipped surrogate is PPO's (arXiv:1707.06347). None of them reads the trust statistics.

Left out. REINFORCE and RLOO make no correction for off-policy tokens of their own; RLOO's paper
takes one action per response, which is the sum over tokens, where we take the normalisation that
is asked for. GRPO's paper takes the sequence mean (`normalization: sequence_mean`) and its KL to
a frozen reference model, which every objective can add (see `reference`); `kl_coefficient` is of a
KL to the rollout policy. DAPO's dynamic sampling chooses prompts and is no part of a loss
(`train.dynamic_sampling`).
"""

from megatron_p3o.algorithms.correction import own_log_ratios
from megatron_p3o.algorithms.kl import k3
from megatron_p3o.algorithms.terms import clipped_surrogate, guarded_ratios, sum_terms
from megatron_p3o.algorithms.trust import TrustStats
from megatron_p3o.config import ClippedObjective, GRPOObjective, ReinforceObjective, RLOOObjective
from megatron_p3o.types import LossOutput, TokenStats


def reinforce_loss(
    stats: TokenStats, trust: TrustStats, config: ReinforceObjective | RLOOObjective
) -> LossOutput:
    """Score-function loss of one microbatch, as a sum over its tokens.

    Returns:
        The loss sum; metrics `loss/score` and `loss/kl` (always 0), both sums.
    """
    return sum_terms(stats, config, score=-stats.advantages * stats.logprobs, corrected="total")


def grpo_loss(stats: TokenStats, trust: TrustStats, config: ClippedObjective) -> LossOutput:
    """Clipped-surrogate loss of one microbatch, as a sum over its tokens.

    rho is continued linearly above e^10 (see `kl`): for A < 0 nothing else bounds its gradient.

    Returns:
        The loss sum; metrics `loss/score`, `loss/kl` (with its coefficient) and
        `<objective>/clip_fraction` (tokens whose score gradient the clip sets to 0), all sums.
    """
    score, clipped = clipped_surrogate(
        guarded_ratios(own_log_ratios(stats, config)),
        stats.advantages,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
    )
    kl = None
    if isinstance(config, GRPOObjective):
        kl = config.kl_coefficient * k3(stats.logprobs - stats.rollout_logprobs)
    return sum_terms(
        stats, config, score=score, kl=kl, metrics={f"{config.name}/clip_fraction": clipped.sum()}
    )
