"""Layouts: both round trips are bitwise, and the order of rows is Megatron's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_p3o.architecture import padded_vocab_size
from megatron_p3o.weights.layouts import GateUp, Layout, Qkv, Replicated, RowParallel, Vocab


def _numbered(*shape: int, start: int = 0) -> Tensor:
    """Every entry differs, so that any misplaced one shows."""
    size = torch.Size(shape).numel()
    return torch.arange(start, start + size, dtype=torch.float32).reshape(shape)


def _round_trip(layout: Layout, hf_tensors: list[Tensor], size: int) -> Tensor:
    """HF -> global -> shards -> global -> HF, asserting both identities; returns the global."""
    merged = layout.merge(hf_tensors)
    shards = [layout.shard(merged, rank, size) for rank in range(size)]
    assert len({shard.shape for shard in shards}) == 1
    assert torch.equal(layout.unshard(shards), merged)
    split = layout.split(merged)
    assert len(split) == len(hf_tensors)
    assert all(torch.equal(*pair) for pair in zip(split, hf_tensors, strict=True))
    return merged


@given(
    size=st.integers(1, 4),
    groups_per_rank=st.integers(1, 3),
    heads_per_group=st.integers(1, 5),
    head_dim=st.integers(1, 7),
    columns=st.integers(0, 5),
)
def test_qkv_round_trips(
    size: int, groups_per_rank: int, heads_per_group: int, head_dim: int, columns: int
) -> None:
    groups = size * groups_per_rank
    heads = groups * heads_per_group
    tail = (columns,) if columns else ()  # no columns: a bias
    query = _numbered(heads * head_dim, *tail)
    key = _numbered(groups * head_dim, *tail, start=10_000)
    value = _numbered(groups * head_dim, *tail, start=20_000)
    _round_trip(Qkv(heads, groups, head_dim), [query, key, value], size)


@given(size=st.integers(1, 5), rows=st.integers(1, 5), columns=st.integers(1, 5))
def test_gate_up_round_trips(size: int, rows: int, columns: int) -> None:
    gate = _numbered(size * rows, columns)
    up = _numbered(size * rows, columns, start=10_000)
    _round_trip(GateUp(), [gate, up], size)


@given(size=st.integers(1, 5), rows=st.integers(1, 5), columns=st.integers(1, 5))
def test_row_parallel_and_replicated_round_trip(size: int, rows: int, columns: int) -> None:
    tensor = _numbered(rows, size * columns)
    _round_trip(RowParallel(), [tensor], size)
    _round_trip(Replicated(), [tensor], size)


@given(size=st.integers(1, 5), vocab_size=st.integers(1, 1500))
def test_vocab_round_trips_and_pads_with_zeros(size: int, vocab_size: int) -> None:
    tensor = _numbered(vocab_size, 2, start=1)
    layout = Vocab(vocab_size)
    _round_trip(layout, [tensor], size)
    padded = torch.cat([layout.shard(tensor, rank, size) for rank in range(size)])
    assert len(padded) == padded_vocab_size(vocab_size, size)
    assert torch.equal(padded[vocab_size:], torch.zeros(len(padded) - vocab_size, 2))


def test_qkv_order_written_by_hand() -> None:
    """Four query heads, two groups, head_dim 1: [q0 q1 k0 v0 | q2 q3 k1 v1]."""
    layout = Qkv(4, 2, 1)
    query, key, value = (torch.tensor(rows) for rows in ([0, 1, 2, 3], [10, 11], [20, 21]))
    merged = layout.merge([query, key, value])
    assert merged.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert layout.shard(merged, 1, 2).tolist() == [2, 3, 11, 21]


def test_more_ranks_than_key_value_heads() -> None:
    """Plain rows of [q0 q1 q2 q3 k v]: Megatron's ranks gather them before they use them."""
    layout = Qkv(4, 1, 1)
    query, key, value = (torch.tensor(rows) for rows in ([0, 1, 2, 3], [10], [20]))
    merged = _round_trip(layout, [query, key, value], 2)
    assert layout.shard(merged, 0, 2).tolist() == [0, 1, 2]
    assert layout.shard(merged, 1, 2).tolist() == [3, 10, 20]


def test_qkv_keeps_the_channels_of_a_head_together() -> None:
    merged = Qkv(2, 1, 2).merge([torch.tensor(r) for r in ([0, 1, 2, 3], [10, 11], [20, 21])])
    assert merged.tolist() == [0, 1, 2, 3, 10, 11, 20, 21]


def test_gate_up_shard_is_not_a_plain_chunk() -> None:
    """Megatron halves a rank's output into gate and up, so each rank needs rows of both."""
    merged = GateUp().merge([torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11, 12, 13])])
    assert merged.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert GateUp().shard(merged, 0, 2).tolist() == [0, 1, 10, 11]
    assert GateUp().shard(merged, 1, 2).tolist() == [2, 3, 12, 13]


def test_row_parallel_cuts_input_channels() -> None:
    assert RowParallel().shard(torch.tensor([[0, 1], [2, 3]]), 1, 2).tolist() == [[1], [3]]


@pytest.mark.parametrize(
    ("layout", "rows"), [(Qkv(6, 3, 2), 24), (GateUp(), 6), (Vocab(5), 6)], ids=str
)
def test_sizes_that_do_not_divide_are_asserted(layout: Layout, rows: int) -> None:
    with pytest.raises(AssertionError):
        layout.shard(_numbered(rows, 2), 0, 2)
