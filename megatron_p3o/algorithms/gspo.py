"""GSPO: one ratio per sequence, clipped as a whole.

For sequence i with len_i response tokens, A_i its advantage,

    s_i = (pi(y_i) / b(y_i))^(1 / len_i) = exp( mean_t log(pi / b) )
    J   = 1/m * sum_i min(s_i * A_i, clip(s_i, 1 - low, 1 + high) * A_i)

Source: arXiv:2507.18071, equations 5 to 7 (and 14: the form per token used here).

Per token. A context shard or microbatch cannot form s_i, so it is an argument, without gradient,
and each token t of the sequence gets the ratio

    r_t = sg(s_i) * (1 + logp_t - sg(logp_t))        value s_i, gradient s_i * grad logp_t

in the clipped surrogate. Under `sequence_mean`, token weights n / (m * len_i) and the division by
n give the value 1/m * sum_i min(...) of J exactly, and where the clip is not active the gradient

    1/m * sum_i A_i * s_i * 1/len_i * sum_t grad logp_t = 1/m * sum_i A_i * grad s_i

which is the paper's, since grad s_i = s_i * grad mean_t logp_t. Where the clip is active both are
0. `sequence_mean` is the default for this reason; other normalisations weigh sequences by length.

Left out: a different advantage per token (the paper's GSPO-token), and a KL term, as the paper.
"""

from megatron_p3o.algorithms.terms import clipped_surrogate, guarded_ratios, sum_terms
from megatron_p3o.algorithms.trust import TrustStats
from megatron_p3o.config import GSPOObjective
from megatron_p3o.types import LossOutput, TokenStats


def gspo_loss(stats: TokenStats, trust: TrustStats, config: GSPOObjective) -> LossOutput:
    """GSPO loss of one microbatch, as a sum over its tokens; needs `stats.sequences`.

    Under a correction that carries p / b, s is the ratio pi / p of the sequence.

    Returns:
        The loss sum; metrics `loss/score`, `loss/kl` (always 0) and `gspo/clip_fraction` (tokens
        of sequences whose gradient the clip sets to 0), all sums.
    """
    assert stats.sequences is not None, "gspo needs TokenStats.sequences"
    log_ratios = stats.sequences.log_ratios
    if config.correction.carries_ratio:
        log_ratios = log_ratios - stats.sequences.mismatch
    score, clipped = clipped_surrogate(
        guarded_ratios(log_ratios) * (1 + stats.logprobs - stats.logprobs.detach()),
        stats.advantages,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
    )
    return sum_terms(stats, config, score=score, metrics={"gspo/clip_fraction": clipped.sum()})
