"""How Hugging Face tensors become one Megatron tensor, and how that is cut over tensor ranks.

Each layout is two inverse pairs:

    Hugging Face tensors  --merge-->  global Megatron tensor  --shard-->    one tensor per rank
                          <--split--                          <--unshard--

No arithmetic touches a value, so both round trips are bitwise. Layouts hold global head counts and
vocabulary sizes and cut the global tensor by rows; no local count is ever derived. Splits and
shards may be views of their input. Sizes that do not divide are refused earlier
(`megatron_p3o.splitting.check_layout`) and asserted here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_p3o.architecture import padded_vocab_size


class Layout(Protocol):
    """Two inverse pairs; `rank` and `size` are those of the tensor-parallel group."""

    def merge(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        """The global Megatron tensor, without padding."""
        ...

    def split(self, global_tensor: Tensor) -> tuple[Tensor, ...]:
        """Inverse of `merge`."""
        ...

    def shard(self, global_tensor: Tensor, rank: int, size: int) -> Tensor:
        """What one tensor rank holds."""
        ...

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """Inverse of `shard`, from all ranks' shards in rank order."""
        ...


@dataclass(frozen=True, slots=True)
class _SingleTensor:
    """One Hugging Face tensor is the global Megatron tensor."""

    def merge(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        (tensor,) = hf_tensors
        return tensor

    def split(self, global_tensor: Tensor) -> tuple[Tensor, ...]:
        return (global_tensor,)


@dataclass(frozen=True, slots=True)
class Replicated(_SingleTensor):
    """Every rank holds the whole tensor (norms)."""

    def shard(self, global_tensor: Tensor, rank: int, size: int) -> Tensor:
        return global_tensor

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return shards[0]


@dataclass(frozen=True, slots=True)
class ColumnParallel(_SingleTensor):
    """Output channels (dim 0) are cut into runs of whole units, such as heads."""

    num_units: int

    def shard(self, global_tensor: Tensor, rank: int, size: int) -> Tensor:
        assert self.num_units % size == 0, (self.num_units, size)
        return _part(global_tensor, rank, size, dim=0)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(shards))


@dataclass(frozen=True, slots=True)
class RowParallel(_SingleTensor):
    """Input channels (dim 1) are cut; each rank computes a part of the sum."""

    def shard(self, global_tensor: Tensor, rank: int, size: int) -> Tensor:
        return _part(global_tensor, rank, size, dim=1)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(shards), dim=1)


@dataclass(frozen=True, slots=True)
class Vocab(_SingleTensor):
    """Vocabulary rows are cut, after zero rows up to Megatron's padded size.

    The padded size depends on the number of ranks, so padding belongs to `shard` and the global
    tensor has `vocab_size` rows.
    """

    vocab_size: int

    def shard(self, global_tensor: Tensor, rank: int, size: int) -> Tensor:
        assert len(global_tensor) == self.vocab_size, (len(global_tensor), self.vocab_size)
        num_rows = padded_vocab_size(self.vocab_size, size) // size
        rows = global_tensor[rank * num_rows : (rank + 1) * num_rows]
        padding = rows.new_zeros(num_rows - len(rows), *rows.shape[1:])
        return torch.cat([rows, padding])

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(shards))[: self.vocab_size]


@dataclass(frozen=True, slots=True)
class Qkv:
    """Query, key and value rows interleaved by key-value group, for a weight or a bias.

    Group g's rows are [its queries' heads, key g, value g], as
    `megatron.core.transformer.attention.SelfAttention` reads them, so that a run of whole groups
    is what one rank needs. Where there are more ranks than groups, each holds a part of a group,
    which Megatron's ranks then gather from each other: nothing is stored twice.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def merge(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        query, key, value = hf_tensors
        groups = [
            part.reshape(self.num_kv_heads, -1, *part.shape[1:]) for part in (query, key, value)
        ]
        return torch.cat(groups, dim=1).flatten(0, 1)

    def split(self, global_tensor: Tensor) -> tuple[Tensor, ...]:
        grouped = global_tensor.reshape(self.num_kv_heads, -1, *global_tensor.shape[1:])
        query_rows = self.num_heads // self.num_kv_heads * self.head_dim
        parts = grouped.split([query_rows, self.head_dim, self.head_dim], dim=1)
        return tuple(part.flatten(0, 1) for part in parts)

    def shard(self, global_tensor: Tensor, rank: int, size: int) -> Tensor:
        groups = self.num_kv_heads
        assert groups % size == 0 or size % groups == 0, (groups, size)
        return _part(global_tensor, rank, size, dim=0)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(shards))


@dataclass(frozen=True, slots=True)
class GateUp:
    """The gate and up projections of a gated MLP, one above the other.

    The global tensor is [gate; up] and each rank's shard is [its gate rows; its up rows], because
    Megatron's MLP halves its local output: plain chunks of the global tensor would pair a gate
    with another rank's up.
    """

    def merge(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        gate, up = hf_tensors
        return torch.cat([gate, up])

    def split(self, global_tensor: Tensor) -> tuple[Tensor, ...]:
        return _halves(global_tensor)

    def shard(self, global_tensor: Tensor, rank: int, size: int) -> Tensor:
        return torch.cat([_part(half, rank, size, dim=0) for half in _halves(global_tensor)])

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        gates, ups = zip(*map(_halves, shards), strict=True)
        return torch.cat([*gates, *ups])


@dataclass(frozen=True, slots=True)
class FusedGateUp(GateUp):
    """As `GateUp`, where Hugging Face keeps [gate; up] as one tensor too."""

    def merge(self, hf_tensors: Sequence[Tensor]) -> Tensor:
        (fused,) = hf_tensors
        return fused

    def split(self, global_tensor: Tensor) -> tuple[Tensor, ...]:
        return (global_tensor,)


def _halves(tensor: Tensor) -> tuple[Tensor, Tensor]:
    return _part(tensor, 0, 2, dim=0), _part(tensor, 1, 2, dim=0)


def _part(tensor: Tensor, rank: int, size: int, *, dim: int) -> Tensor:
    """The `rank`-th of `size` equal parts along `dim`, a view."""
    assert tensor.shape[dim] % size == 0, (tuple(tensor.shape), dim, size)
    return tensor.chunk(size, dim)[rank]
