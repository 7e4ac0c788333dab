import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_p3o.parallel.batching import Microbatch, collate, deal, make_microbatches
from megatron_p3o.types import Sample, ScoredSample

CPU = torch.device("cpu")


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
    batch = collate([scored("a", 3, 2, 1.5), scored("b", 1, 1, -1.0)], CPU)
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
    batch = collate([scored("a", 3, 2), scored("b", 1, 3)], CPU)
    assert [batch.locate_token(i) for i in range(5)] == [
        ("a/0", 0),
        ("a/0", 1),
        ("b/0", 0),
        ("b/0", 1),
        ("b/0", 2),
    ]


def test_an_empty_microbatch_still_has_a_sequence() -> None:
    batch = collate([], CPU)
    assert batch.input_ids.tolist() == [[0]]
    assert batch.num_tokens == 0
    # As does one whose only sample has a lone prompt token and no response.
    assert collate([scored("a", 1, 0)], CPU).input_ids.tolist() == [[0]]


def labels(batches: list[Microbatch]) -> list[int]:
    return [label for batch in batches for label in batch.labels.tolist()]


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 5),
)
def test_every_token_is_in_one_microbatch_of_one_rank(
    sizes: list[tuple[int, int]], data_size: int, microbatch_size: int
) -> None:
    samples = [scored(str(i), *size) for i, size in enumerate(sizes)]
    ranks = [
        make_microbatches(
            samples,
            microbatch_size=microbatch_size,
            data_rank=rank,
            data_size=data_size,
            device=CPU,
        )
        for rank in range(data_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(len(b.samples) <= microbatch_size for batches in ranks for b in batches)
    names = [s.sample.name for batches in ranks for b in batches for s in b.samples]
    assert sorted(names) == sorted(s.sample.name for s in samples)
    assert sum(len(labels(batches)) for batches in ranks) == sum(r for _, r in sizes)


def test_lengths_and_counts_are_filled_up_to_multiples() -> None:
    samples = [scored(str(i), 1, length) for i, length in enumerate([5, 4, 2])]
    batches = make_microbatches(
        samples,
        microbatch_size=1,
        data_rank=0,
        data_size=1,
        device=CPU,
        length_multiple=3,
        count_multiple=2,
    )
    assert [tuple(batch.input_ids.shape) for batch in batches] == [(1, 6), (1, 6), (1, 3), (1, 3)]
    assert [batch.num_tokens for batch in batches] == [5, 4, 2, 0]


def test_long_and_short_sequences_are_shared_evenly() -> None:
    samples = [scored(str(i), 1, length) for i, length in enumerate([9, 1, 8, 2, 7, 3])]
    lengths = [[s.sample.num_response_tokens for s in share] for share in deal(samples, 2)]
    # Snake order: 9 | 8, then 3 | 7 would be wrong; 7 goes to the rank that got 8.
    assert lengths == [[9, 3, 2], [8, 7, 1]]
