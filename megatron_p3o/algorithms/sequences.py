"""Sequence-level statistics from sums that merge exactly, whoever holds which tokens.

GSPO and sequence-level corrections weigh a token by its whole sequence. A context shard holds only
some tokens of a sequence, so the mean over a sequence is made in two steps, with the caller's
reduction between them:

    sums = sequence_sums(log_ratios, mismatch, index, num_sequences)      local, additive
    (sum over the ranks that share the sequences)
    stats = sequence_stats(sums, lengths, index)                          per token again
"""

import torch
from torch import Tensor

from megatron_p3o.types import SequenceStats


def sequence_sums(
    log_ratios: Tensor, mismatch: Tensor, index: Tensor, num_sequences: int
) -> Tensor:
    """Per-sequence sums of the local tokens, additive over shards.

    Args:
        log_ratios: `[T]` log(pi / b); gradient is not followed.
        mismatch: `[T]` log(p / b).
        index: `[T]` int64, which of the B sequences each token belongs to.
        num_sequences: B.

    Returns:
        `[2, B]` float64: sums of `log_ratios` and of `mismatch`.
    """
    values = torch.stack([log_ratios.detach(), mismatch.detach()]).double()
    return values.new_zeros(2, num_sequences).index_add_(1, index, values)


def sequence_stats(
    sums: Tensor, lengths: Tensor, index: Tensor, dtype: torch.dtype = torch.float32
) -> SequenceStats:
    """What each local token knows of its sequence.

    Args:
        sums: `[2, B]` of `sequence_sums`, merged over all shards.
        lengths: `[B]` response tokens of the whole sequences. Where it is 0 nothing is read.
        index: `[T]` as for `sequence_sums`.
        dtype: of the result.
    """
    means = (sums / lengths)[:, index].to(dtype)
    return SequenceStats(log_ratios=means[0], mismatch=means[1], lengths=lengths[index].to(dtype))
