"""P4O: P3O with two anchors, the behaviour policy b and the proximal policy p.

p is the trainer when the rollout batch was first consumed. With rho = pi / b,

    loss = 1/n * sum_t [ - sg(min(rho_t, e)) * A_t * logp_t  +  (1 - e) * KL_t ]
    e    = min(e_b, e_p)                    normalised ESS of pi / b and of pi / p
    KL_t = k3 of l_t = logp_t - log mix_t   guarded (see `kl`)
    mix  = a * b + (1 - a) * p              a = (1 - e_b) / ((1 - e_b) + (1 - e_p))

so the policy is pulled towards the anchor that it has left the further. Source: the P3O authors'
code, FeynRL `algs/P4O`, after arXiv:2605.12380. Everything but logp is without gradient.

While p is the present trainer, as in the only or first optimizer step of a rollout batch, e_p = 1
and a = 1: this is P3O. Where both ESS are 1 there is no regulariser, and a does not matter.

Left out, as in P3O: a lower cap, a branch on the sign of A, a clip range.
"""

import math

import torch
from torch import Tensor

from megatron_p3o.algorithms.kl import KL_ESTIMATORS
from megatron_p3o.algorithms.terms import sum_terms
from megatron_p3o.algorithms.trust import TrustStats
from megatron_p3o.config import P4OObjective
from megatron_p3o.types import LossOutput, TokenStats


def p4o_loss(stats: TokenStats, trust: TrustStats, config: P4OObjective) -> LossOutput:
    """P4O loss of one microbatch, as a sum over its tokens; needs proximal log-probs.

    Args:
        stats: the microbatch's tokens; `logprobs` carries gradient.
        trust: of the tokens that share one ESS; `ess` is e_b and `ess_drift` is e_p.
        config: the KL estimator.

    Returns:
        The loss sum; metrics `loss/score`, `loss/kl` (with its weight) and `p4o/cap_fraction`
        (tokens with rho above the cap), all sums.
    """
    cap = min(trust.ess, trust.ess_drift)
    ratios = (stats.logprobs - stats.rollout_logprobs).detach().exp()
    kl = KL_ESTIMATORS[config.kl_estimator](stats.logprobs - _mixture_logprobs(stats, trust))
    return sum_terms(
        stats,
        config,
        score=-ratios.clamp(max=cap) * stats.advantages * stats.logprobs,
        kl=(1 - cap) * kl,
        metrics={"p4o/cap_fraction": (ratios > cap).sum()},
    )


def _mixture_logprobs(stats: TokenStats, trust: TrustStats) -> Tensor:
    """`[T]` log of a * b + (1 - a) * p at the sampled tokens."""
    assert stats.proximal_logprobs is not None, "p4o needs proximal log-probs"
    behavior, proximal = 1 - trust.ess, 1 - trust.ess_drift
    share = behavior / (behavior + proximal) if behavior + proximal > 0 else 1.0
    return torch.logaddexp(
        stats.rollout_logprobs + _log(share), stats.proximal_logprobs + _log(1 - share)
    )


def _log(share: float) -> float:
    """log, with log 0 = -inf: the other anchor is then alone in the mixture."""
    return math.log(share) if share > 0 else -math.inf
