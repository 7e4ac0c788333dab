"""Decoupled PPO: clip against a proximal policy, correct for the behaviour policy by a weight.

    loss_t = - sg(min(p_t / b_t, cap)) * min(r_t * A_t, clip(r_t, 1 - low, 1 + high) * A_t)

with r = pi / p. The trust region is around p, the trainer when the rollout batch was first
consumed, so its width does not depend on how stale the data is; the staleness is corrected by
the importance weight p / b. Source: arXiv:2110.00641 (PPO-EWMA), section 3; the cap and its use
for asynchronous language-model RL: AReaL, arXiv:2505.24298.

Left out: a value function (advantages are group-relative), PPO-EWMA's averaged weights for p, and
AReaL's rule to drop tokens above the cap instead of capping them, which is objective `grpo` with
`correction: {mode: mask, high: cap}`.
"""

from megatron_p3o.algorithms.terms import clipped_surrogate, guarded_ratios, sum_terms
from megatron_p3o.algorithms.trust import TrustStats
from megatron_p3o.config import PPODecoupledObjective
from megatron_p3o.types import LossOutput, TokenStats


def ppo_decoupled_loss(
    stats: TokenStats, trust: TrustStats, config: PPODecoupledObjective
) -> LossOutput:
    """Decoupled PPO loss of one microbatch, as a sum over its tokens; needs proximal log-probs.

    Returns:
        The loss sum; metrics `loss/score`, `loss/kl` (always 0), `ppo_decoupled/clip_fraction`
        (tokens whose gradient the clip sets to 0) and `ppo_decoupled/cap_fraction` (tokens with
        p / b above the cap), all sums.
    """
    assert stats.proximal_logprobs is not None, "ppo_decoupled needs proximal log-probs"
    score, clipped = clipped_surrogate(
        guarded_ratios(stats.logprobs - stats.proximal_logprobs),
        stats.advantages,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
    )
    behavior = (stats.proximal_logprobs - stats.rollout_logprobs).detach().exp()
    return sum_terms(
        stats,
        config,
        score=behavior.clamp(max=config.behavior_weight_cap) * score,
        metrics={
            "ppo_decoupled/clip_fraction": clipped.sum(),
            "ppo_decoupled/cap_fraction": (behavior > config.behavior_weight_cap).sum(),
        },
    )
