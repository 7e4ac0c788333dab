"""Zig-zag sequence shards: hand values, and every position on exactly one rank."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_p3o.config import LayoutSection
from megatron_p3o.parallel.context import SequenceShard
from megatron_p3o.parallel.cpu_attention import in_order


def shards(size: int, multiple: int) -> list[SequenceShard]:
    return [SequenceShard(rank=rank, size=size, multiple=multiple) for rank in range(size)]


def test_each_rank_holds_a_part_from_either_end() -> None:
    assert [s.positions(12).tolist() for s in shards(3, 6)] == [
        [0, 1, 10, 11],
        [2, 3, 8, 9],
        [4, 5, 6, 7],
    ]
    assert SequenceShard().positions(3).tolist() == [0, 1, 2]


def test_lengths_are_padded_up_and_never_zero() -> None:
    shard = SequenceShard(rank=0, size=2, multiple=4)
    assert [shard.padded(length) for length in (0, 1, 4, 5, 8)] == [4, 4, 4, 8, 8]
    assert SequenceShard().padded(0) == 1


@pytest.mark.parametrize(
    ("layout", "multiple"),
    [
        ({}, 1),
        ({"tensor": 4}, 1),
        ({"tensor": 4, "sequence_parallel": True}, 4),
        ({"context": 3}, 6),
        ({"context": 3, "tensor": 2}, 6),
        # Each of 2 context ranks holds two equal parts, together a multiple of 4 tensor ranks.
        ({"context": 2, "tensor": 4, "sequence_parallel": True}, 8),
        ({"context": 2, "tensor": 3, "sequence_parallel": True}, 12),
    ],
)
def test_what_sequences_must_be_a_multiple_of(layout: dict[str, int], multiple: int) -> None:
    assert LayoutSection(**layout).sequence_multiple == multiple


@given(st.integers(1, 9), st.integers(1, 4), st.booleans(), st.integers(0, 100))
def test_every_position_is_on_one_rank_and_the_order_comes_back(
    context: int, tensor: int, sequence_parallel: bool, length: int
) -> None:
    section = LayoutSection(
        context=context, tensor=tensor, sequence_parallel=sequence_parallel and tensor > 1
    )
    ranks = shards(context, section.sequence_multiple)
    padded = ranks[0].padded(length)
    assert length <= padded < length + section.sequence_multiple + (length == 0)
    positions = [shard.positions(padded) for shard in ranks]
    assert {len(held) for held in positions} == {padded // context}
    if section.sequence_parallel:
        assert len(positions[0]) % tensor == 0
    assert sorted(torch.cat(positions).tolist()) == list(range(padded))
    if context > 1:
        assert in_order(torch.stack(positions)).tolist() == list(range(padded))
        # Causal attention: as many (query, key) pairs on every rank.
        assert len({int((held + 1).sum()) for held in positions}) == 1
