"""SAPO: a soft gate where PPO has a hard clip.

    loss_t   = - f(rho_t) * A_t         f(x) = 4 / tau * sigmoid(tau * (x - 1))
    gradient = - gate_t * rho_t * A_t   gate = 4 * p * (1 - p),  p = sigmoid(tau * (rho - 1))

with tau = tau_positive where A > 0, else tau_negative, and rho = pi / b. The gate is 1 at rho = 1
whatever tau is, and falls on both sides, faster for a larger tau: tokens far off-policy fade out
smoothly. tau_negative > tau_positive damps negative advantages more, since those raise many other
tokens. Source: arXiv:2511.20347.

Left out: nothing of the loss. The paper takes the sequence mean, which is the default here.
"""

import torch

from megatron_p3o.algorithms.correction import own_log_ratios
from megatron_p3o.algorithms.terms import guarded_ratios, sum_terms
from megatron_p3o.algorithms.trust import TrustStats
from megatron_p3o.config import SAPOObjective
from megatron_p3o.types import LossOutput, TokenStats


def sapo_loss(stats: TokenStats, trust: TrustStats, config: SAPOObjective) -> LossOutput:
    """SAPO loss of one microbatch, as a sum over its tokens.

    rho is continued linearly above e^10 (see `kl`); the gate is 0 there.

    Returns:
        The loss sum; metrics `loss/score`, `loss/kl` (always 0) and `sapo/gate_mean` (the gate of
        each token, in [0, 1]), all sums.
    """
    ratios = guarded_ratios(own_log_ratios(stats, config))
    tau = torch.where(
        stats.advantages > 0,
        torch.full_like(ratios, config.tau_positive),
        torch.full_like(ratios, config.tau_negative),
    )
    soft = torch.sigmoid(tau * (ratios - 1))
    gate = 4 * soft.detach() * (1 - soft.detach())
    return sum_terms(
        stats,
        config,
        score=-4 / tau * soft * stats.advantages,
        metrics={"sapo/gate_mean": gate.sum()},
    )
