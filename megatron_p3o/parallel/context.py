"""Sequence shards: which positions of a sequence a context rank computes. Imports no Megatron.

A sequence of S positions is cut into 2 * size equal chunks; rank r holds chunks r and
2 * size - 1 - r, in this order ("zig-zag"), so that under the causal mask every rank has the same
work. This is the order that Transformer Engine's ring attention and Megatron's rotary embedding
(megatron/core/models/common/embeddings/rope_utils.py) take for granted. Since tokens are
label-aligned before they are cut, no shard needs a neighbour's token.

    size 2, S 8:    rank 0: 0 1 6 7    rank 1: 2 3 4 5
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceShard:
    """One context rank's share of every sequence; the default is the whole sequence."""

    rank: int = 0
    size: int = 1
    multiple: int = 1
    """Sequences are padded to a multiple of it; see `LayoutSection.sequence_multiple`."""

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size
        assert self.size == 1 or self.multiple % (2 * self.size) == 0

    def padded(self, length: int) -> int:
        """Least legal length that holds `length` tokens; never 0."""
        return max(1, -(-length // self.multiple)) * self.multiple

    def positions(self, padded_length: int) -> Tensor:
        """Positions of this shard in the order in which it holds them, [padded_length / size]."""
        every = torch.arange(padded_length)
        if self.size == 1:
            return every
        chunks = every.chunk(2 * self.size)
        return torch.cat([chunks[self.rank], chunks[2 * self.size - 1 - self.rank]])
