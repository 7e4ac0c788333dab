from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_p3o.parallel.batching import (
    Microbatch,
    PackingPlan,
    collate,
    deal,
    make_microbatches,
    sequence_length,
)
from megatron_p3o.parallel.context import SequenceShard
from megatron_p3o.parallel.packing import SequenceCost
from megatron_p3o.types import RoutedExperts, Sample, ScoredSample

CPU = torch.device("cpu")
WHOLE = SequenceShard()


def padded(samples: list[ScoredSample], shard: SequenceShard = WHOLE) -> Microbatch:
    return collate(samples, CPU, shard, packed=False)


def packed(samples: list[ScoredSample], shard: SequenceShard = WHOLE) -> Microbatch:
    return collate(samples, CPU, shard, packed=True)


def scored(name: str, prompt: int, response: int, advantage: float = 1.0) -> ScoredSample:
    return ScoredSample(
        sample=Sample(
            prompt_id=name,
            sample_index=0,
            prompt_ids=tuple(range(10, 10 + prompt)),
            response_ids=tuple(range(50, 50 + response)),
            rollout_logprobs=tuple(-0.5 - i for i in range(response)),
            finish_reason="stop",
            weight_version_min=0,
            weight_version_max=0,
        ),
        advantage=advantage,
        token_weight=2.0,
    )


def test_tokens_are_aligned_with_the_position_that_predicts_them() -> None:
    batch = padded([scored("a", 3, 2, 1.5), scored("b", 1, 1, -1.0)])
    # The last token of a sequence predicts nothing and does not enter the model.
    assert batch.input_ids.tolist() == [[10, 11, 12, 50], [10, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    # Prompt token 12 at position 2 predicts 50; response token 50 at position 3 predicts 51.
    assert batch.token_rows.tolist() == [0, 0, 1]
    assert batch.token_cols.tolist() == [2, 3, 0]
    assert batch.labels.tolist() == [50, 51, 50]
    assert batch.rollout_logprobs.tolist() == [-0.5, -1.5, -0.5]
    assert batch.advantages.tolist() == [1.5, 1.5, -1.0]
    assert batch.token_weights.tolist() == [2.0, 2.0, 2.0]


def test_tokens_are_located_by_sample_and_position() -> None:
    for collated in (padded, packed):
        batch = collated([scored("a", 3, 2), scored("empty", 2, 0), scored("b", 1, 3)])
        assert [batch.locate_token(i) for i in range(5)] == [
            ("a/0", 0),
            ("a/0", 1),
            ("b/0", 0),
            ("b/0", 1),
            ("b/0", 2),
        ]


def test_packed_sequences_follow_each_other_in_one_row() -> None:
    batch = packed([scored("a", 3, 2, 1.5), scored("b", 1, 1, -1.0), scored("c", 2, 1)])
    assert batch.input_ids.tolist() == [[10, 11, 12, 50, 10, 10, 11]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 0, 1]]
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.dtype is torch.int32
    assert batch.cu_seqlens.tolist() == [0, 4, 5, 7]
    # The longest sequence, not the pack: Megatron reads rotary positions by it.
    assert batch.max_seqlen == 4
    assert batch.token_rows.tolist() == [0, 0, 0, 0]
    assert batch.token_cols.tolist() == [2, 3, 4, 6]
    assert batch.labels.tolist() == [50, 51, 50, 50]
    assert batch.advantages.tolist() == [1.5, 1.5, -1.0, 1.0]


def test_a_context_rank_holds_the_tokens_of_its_positions() -> None:
    samples = [scored("a", 3, 4), scored("b", 1, 1)]
    ranks = [padded(samples, SequenceShard(rank=rank, size=2, multiple=4)) for rank in range(2)]
    # Sequence a enters as 10 11 12 50 51 52, padded to 8: rank 0 holds 0 1 6 7, rank 1 2 3 4 5.
    assert [batch.input_ids.tolist() for batch in ranks] == [
        [[10, 11, 0, 0], [10, 0, 0, 0]],
        [[12, 50, 51, 52], [0, 0, 0, 0]],
    ]
    assert ranks[0].position_ids.tolist() == [[0, 1, 6, 7], [0, 1, 6, 7]]
    assert [batch.labels.tolist() for batch in ranks] == [[50], [50, 51, 52, 53]]
    assert [batch.token_rows.tolist() for batch in ranks] == [[1], [0, 0, 0, 0]]
    assert [batch.token_cols.tolist() for batch in ranks] == [[0], [0, 1, 2, 3]]
    assert ranks[0].locate_token(0) == ("b/0", 0)
    assert ranks[1].locate_token(2) == ("a/0", 2)


def test_packed_sequences_are_cut_one_by_one() -> None:
    samples = [scored("a", 3, 4), scored("b", 1, 2)]
    ranks = [packed(samples, SequenceShard(rank=rank, size=2, multiple=4)) for rank in range(2)]
    for batch in ranks:  # boundaries of the whole sequences, 6 padded to 8 and 2 to 4
        assert batch.cu_seqlens is not None
        assert batch.cu_seqlens.tolist() == [0, 8, 12]
        assert batch.max_seqlen == 8
    assert ranks[0].position_ids.tolist() == [[0, 1, 6, 7, 0, 3]]
    assert ranks[1].position_ids.tolist() == [[2, 3, 4, 5, 1, 2]]
    assert ranks[0].labels.tolist() == [50]
    assert ranks[0].token_cols.tolist() == [4]
    assert ranks[1].labels.tolist() == [50, 51, 52, 53, 51]
    assert ranks[1].token_cols.tolist() == [0, 1, 2, 3, 4]
    assert ranks[1].locate_token(4) == ("b/0", 1)


def test_an_empty_microbatch_still_has_a_sequence() -> None:
    half = SequenceShard(rank=1, size=2, multiple=4)
    for collated in (padded, packed):
        batch = collated([])
        assert batch.input_ids.tolist() == [[0]]
        assert batch.num_tokens == 0
        # As does one whose only sample has a lone prompt token and no response.
        assert collated([scored("a", 1, 0)]).input_ids.tolist() == [[0]]
        assert collated([], half).input_ids.tolist() == [[0, 0]]
        assert collated([], half).position_ids.tolist() == [[1, 2]]
    empty = packed([], half)
    assert empty.cu_seqlens is not None
    assert empty.cu_seqlens.tolist() == [0, 4]


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 3),
    st.booleans(),
)
def test_every_token_is_in_one_microbatch_of_one_rank(
    sizes: list[tuple[int, int]],
    data_size: int,
    microbatch_size: int,
    context_size: int,
    packing: bool,
) -> None:
    samples = [scored(str(i), *size) for i, size in enumerate(sizes)]
    multiple = 2 * context_size if context_size > 1 else 1
    plan = PackingPlan(max_tokens=24, cost=SequenceCost(crossover=8.0))
    ranks = [  # [data rank][context rank][microbatch]
        [
            make_microbatches(
                samples,
                microbatch_size=microbatch_size,
                data_rank=data_rank,
                data_size=data_size,
                device=CPU,
                shard=SequenceShard(rank=context_rank, size=context_size, multiple=multiple),
                packing=plan if packing else None,
            )
            for context_rank in range(context_size)
        ]
        for data_rank in range(data_size)
    ]
    assert len({len(batches) for contexts in ranks for batches in contexts}) == 1
    for contexts in ranks:
        for b in contexts[0]:
            assert packing or len(b.samples) <= microbatch_size
            if packing:
                assert (
                    sum(
                        SequenceShard(multiple=multiple).padded(sequence_length(s))
                        for s in b.samples
                    )
                    <= 24
                )
        for shards in zip(*contexts, strict=True):  # all context ranks cut the same sequences
            assert len({b.samples for b in shards}) == 1
            assert len({b.input_ids.shape for b in shards}) == 1
    names = [s.sample.name for contexts in ranks for b in contexts[0] for s in b.samples]
    assert sorted(names) == sorted(s.sample.name for s in samples)
    located = [
        (*b.locate_token(i), int(b.labels[i]), float(b.rollout_logprobs[i]))
        for contexts in ranks
        for batches in contexts
        for b in batches
        for i in range(b.num_tokens)
    ]
    assert sorted(located) == sorted(
        (s.sample.name, i, 50 + i, -0.5 - i)
        for s in samples
        for i in range(s.sample.num_response_tokens)
    )
    assert_predicted_at_the_right_place(ranks)


def assert_predicted_at_the_right_place(ranks: list[list[list[Microbatch]]]) -> None:
    """At the selected position: the token before the label, the prompt's last or a response's."""
    for b in (b for contexts in ranks for batches in contexts for b in batches):
        at = b.input_ids[b.token_rows, b.token_cols].tolist()
        where = b.position_ids[b.token_rows, b.token_cols].tolist()
        for i in range(b.num_tokens):
            prompt = b.samples[int(b.token_samples[i])].sample.prompt_ids
            response = int(b.token_positions[i])
            assert where[i] == len(prompt) - 1 + response
            assert at[i] == (49 + response if response else prompt[-1])


def test_lengths_and_counts_are_filled_up_to_multiples() -> None:
    samples = [scored(str(i), 1, length) for i, length in enumerate([5, 4, 2])]
    batches = make_microbatches(
        samples,
        microbatch_size=1,
        data_rank=0,
        data_size=1,
        device=CPU,
        shard=SequenceShard(rank=0, size=1, multiple=3),
        packing=None,
        count_multiple=2,
    )
    assert [tuple(batch.input_ids.shape) for batch in batches] == [(1, 6), (1, 6), (1, 3), (1, 3)]
    assert [batch.num_tokens for batch in batches] == [5, 4, 2, 0]


def test_long_and_short_sequences_are_shared_evenly() -> None:
    samples = [scored(str(i), 1, length) for i, length in enumerate([9, 1, 8, 2, 7, 3])]
    lengths = [[s.sample.num_response_tokens for s in share] for share in deal(samples, 2)]
    # Snake order: 9 | 8, then 3 | 7 would be wrong; 7 goes to the rank that got 8.
    assert lengths == [[9, 3, 2], [8, 7, 1]]


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=4),
    st.sampled_from([(1, 1), (2, 0), (2, 1)]),
    st.booleans(),
)
def test_routed_experts_stay_with_their_tokens(
    sizes: list[tuple[int, int]], place: tuple[int, int], is_packed: bool
) -> None:
    """Every token's experts say its sequence, its position and the layer."""
    size, rank = place
    shard = SequenceShard(rank=rank % size, size=size, multiple=2 * size if size > 1 else 1)
    samples = []
    for index, (prompt, response) in enumerate(sizes):
        position = torch.arange(prompt + response - 1)
        experts_NMK = torch.stack([position, position + 100, position * 0 + index], dim=1)
        one = scored(str(index), prompt, response)
        experts = RoutedExperts.from_tensor(experts_NMK[:, :, None])
        samples.append(replace(one, sample=replace(one.sample, routed_experts=experts)))
    batch = collate(samples, CPU, shard, packed=is_packed, experts_shape=(3, 1))
    assert batch.routed_experts is not None
    assert batch.routed_experts.shape == (*batch.input_ids.shape, 3, 1)
    num_seen = 0
    for row in range(len(batch.input_ids)):
        for ids, at, experts in zip(
            batch.input_ids[row],
            batch.position_ids[row],
            batch.routed_experts[row, :, :, 0].tolist(),
            strict=True,
        ):
            if ids == 0:  # padding: no token is 0
                assert experts == [-1, -1, -1]
                continue
            num_seen += 1
            assert experts[:2] == [at, at + 100]
            sample = samples[experts[2]].sample
            assert ids == (*sample.prompt_ids, *sample.response_ids)[at]
    if size == 1:
        assert num_seen == sum(map(sequence_length, samples))
    assert collate(samples, CPU, shard, packed=is_packed).routed_experts is None
