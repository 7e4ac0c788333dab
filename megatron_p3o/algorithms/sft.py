"""Supervised fine-tuning: the negative log-likelihood of given answers.

    - logp_t

Advantages and ratios play no part; there is no behaviour policy.
"""

from megatron_p3o.algorithms.terms import sum_terms
from megatron_p3o.algorithms.trust import TrustStats
from megatron_p3o.config import SFTObjective
from megatron_p3o.types import LossOutput, TokenStats


def sft_loss(stats: TokenStats, trust: TrustStats, config: SFTObjective) -> LossOutput:
    """Negative log-likelihood of one microbatch, as a sum over its tokens.

    Returns:
        The loss sum; metrics `loss/score` and `loss/kl` (always 0), both sums.
    """
    return sum_terms(stats, config, score=-stats.logprobs)
