"""Packs: within the budget, as many on every rank, alike in cost."""

import math
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megatron_p3o.architecture import ModelArchitecture, MoeArchitecture
from megatron_p3o.parallel.packing import SequenceCost, pack

LINEAR = SequenceCost(crossover=math.inf)
ARCHITECTURE = ModelArchitecture(
    family="qwen3",
    num_layers=2,
    hidden_size=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=3,
    ffn_hidden_size=10,
    vocab_size=11,
    max_position_embeddings=64,
    norm_epsilon=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    tie_word_embeddings=True,
    qkv_bias=False,
    qk_layernorm=True,
    initializer_range=0.02,
    eos_token_ids=(1,),
    torch_dtype="float32",
)


def test_attention_weighs_in_as_the_model_says() -> None:
    # Weights: 8 x (2 x 12 + 2 x 6 + 3 x 10) = 528 multiplications a token; attention of S tokens:
    # 12 x S^2, as much at S = 44.
    cost = SequenceCost.of(ARCHITECTURE)
    assert cost.crossover == 44
    assert cost(44) == 88
    assert SequenceCost.of(replace(ARCHITECTURE, ffn_hidden_size=21)).crossover > 44


def test_experts_cost_what_a_token_uses_of_them() -> None:
    moe = MoeArchitecture(
        num_experts=16,
        experts_per_token=4,
        ffn_hidden_size=7,
        normalize_topk=True,
        layers=(0, 2),
    )
    every_other = SequenceCost.of(replace(ARCHITECTURE, num_layers=4, moe=moe))
    # Half the layers use 4 x 7 channels and half 10: 19 on average.
    assert every_other.crossover == 8 * (2 * 12 + 2 * 6 + 3 * 19) / 12


def test_packs_by_hand() -> None:
    # 10 goes alone; 6 and 4 fill one pack, 5 and 5 another.
    lengths = [4, 10, 5, 6, 5]
    packs = pack(lengths, max_tokens=10, num_ranks=1, cost=LINEAR)
    assert sorted(packs[0]) == [[0, 3], [1], [2, 4]]
    # Two ranks cannot share three packs, so there are four.
    two_ranks = pack(lengths, max_tokens=10, num_ranks=2, cost=LINEAR)
    assert [len(packs) for packs in two_ranks] == [2, 2]


def test_a_long_sequence_weighs_more_than_its_tokens() -> None:
    lengths = [8, 4, 4, 4, 4]
    tokens_alike = pack(lengths, max_tokens=24, num_ranks=2, cost=LINEAR)
    assert sorted(tokens_alike) == [[[0, 3]], [[1, 2, 4]]]
    # 8 + 64 / 2 = 40 is as much as four times 4 + 16 / 2 = 12 and no more is added to it.
    cost_alike = pack(lengths, max_tokens=24, num_ranks=2, cost=SequenceCost(crossover=2))
    assert sorted(cost_alike) == [[[0]], [[1, 2, 3, 4]]]


def test_no_sequences_give_one_empty_pack_a_rank() -> None:
    assert pack([], max_tokens=8, num_ranks=3, cost=LINEAR) == [[[]], [[]], [[]]]


@given(
    st.lists(st.integers(1, 50), max_size=40),
    st.integers(50, 120),
    st.integers(1, 5),
    st.floats(1, 1000),
)
def test_every_sequence_is_in_one_pack_within_the_budget(
    lengths: list[int], max_tokens: int, num_ranks: int, crossover: float
) -> None:
    cost = SequenceCost(crossover=crossover)
    ranks = pack(lengths, max_tokens=max_tokens, num_ranks=num_ranks, cost=cost)
    assert len({len(packs) for packs in ranks}) == 1
    packs = [members for packs in ranks for members in packs]
    assert sorted(index for members in packs for index in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= max_tokens for members in packs)
    assert all(a < b for members in packs for a, b in pairwise(members))
    # Never more packs than twice what the budget needs, rounded up to the ranks.
    assert len(packs) <= 2 * -(-sum(lengths) // max_tokens) + num_ranks
    assert pack(lengths, max_tokens=max_tokens, num_ranks=num_ranks, cost=cost) == ranks


@given(st.lists(st.integers(1, 50), min_size=32, max_size=64), st.integers(2, 4))
def test_ranks_differ_by_less_than_one_sequence(lengths: list[int], num_ranks: int) -> None:
    cost = SequenceCost(crossover=40)
    # A budget with room to spare: only balance decides.
    ranks = pack(lengths, max_tokens=sum(lengths), num_ranks=num_ranks, cost=cost)
    totals = [sum(cost(lengths[i]) for members in packs for i in members) for packs in ranks]
    assert max(totals) - min(totals) <= cost(max(lengths))
