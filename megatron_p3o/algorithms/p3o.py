"""P3O: the batch's own effective sample size decides how far off-policy data is trusted.

For tokens t with l_t = logp_t - logb_t (trainer minus rollout engine) and rho_t = exp(l_t),

    loss = 1/n * sum_t [ - sg(min(rho_t, e)) * A_t * logp_t  +  (1 - e) * KL_t ]
    e    = (sum rho)^2 / (n * sum rho^2)            normalised ESS of the batch, in [1/n, 1]
    KL_t = l_t + exp(-l_t) - 1                      k3, guarded (see `kl`)

Source: arXiv:2605.12380, after arXiv:1905.01756.

Sign and gradient of each term. The score term is a loss: a positive advantage raises logp. Its
weight min(rho, e) is wholly stop-gradient, so the gradient is a capped importance-weighted
REINFORCE gradient: no token's gradient is ever switched off, as a PPO clip would do. The KL term
carries gradient and pulls the trainer towards the rollout policy, the more so the less the batch
is trusted. e is a plain number in both roles. On-policy (rho = 1, so e = 1) this is REINFORCE.

Left out on purpose: a lower cap, a branch on the sign of A, a clip range. The ESS is an argument:
this module has no collectives, and the caller decides which tokens e speaks of.
"""

import math

import torch

from megatron_p3o.algorithms.kl import KL_ESTIMATORS
from megatron_p3o.algorithms.terms import sum_terms
from megatron_p3o.algorithms.trust import TrustStats
from megatron_p3o.config import P3OObjective
from megatron_p3o.types import LossOutput, TokenStats


def p3o_loss(stats: TokenStats, trust: TrustStats, config: P3OObjective) -> LossOutput:
    """P3O loss of one microbatch, as a sum over its tokens.

    Args:
        stats: the microbatch's tokens; `logprobs` carries gradient.
        trust: of the tokens that share one ESS, normally the whole optimizer step.
        config: what caps the ratio and what weighs the KL term (ablations).

    Returns:
        The loss sum; metrics `loss/score`, `loss/kl` (with its weight) and `p3o/cap_fraction`
        (tokens with rho above the cap), all sums.
    """
    log_ratios = stats.logprobs - stats.rollout_logprobs
    ratios = log_ratios.detach().exp()
    cap = _cap(trust, config)
    # An overflowed ratio stays finite without a cap too, since inf * (A = 0) would be NaN.
    weights = ratios.clamp(max=min(cap, torch.finfo(ratios.dtype).max))
    kl = KL_ESTIMATORS[config.kl_estimator](log_ratios)
    return sum_terms(
        stats,
        config,
        score=-weights * stats.advantages * stats.logprobs,
        kl=_regularizer_weight(trust, config) * kl,
        metrics={"p3o/cap_fraction": (ratios > cap).sum()},
    )


def _cap(trust: TrustStats, config: P3OObjective) -> float:
    if config.cap == "ess":
        return trust.ess
    if config.cap == "none":
        return math.inf
    assert config.cap_constant is not None
    return config.cap_constant


def _regularizer_weight(trust: TrustStats, config: P3OObjective) -> float:
    if config.regularizer == "adaptive":
        return 1.0 - trust.ess
    if config.regularizer == "off":
        return 0.0
    assert config.regularizer_constant is not None
    return config.regularizer_constant
