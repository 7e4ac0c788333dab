"""Samples to microbatches, dealt over the data-parallel ranks and cut over the context ranks.

The label alignment of the whole system happens here and nowhere else: a sequence of P prompt and
R response tokens enters the model as its first P + R - 1 tokens (the last one predicts nothing),
and response token i is predicted at position P - 1 + i. `token_rows` and `token_cols` select those
positions from the model's output, so everything behind them is `[T]`, without padding. With
context parallelism a rank's `[T]` holds the response tokens predicted at its own positions.

A microbatch is either padded (a row per sequence, all of one length) or packed (one row, sequence
after sequence, with their boundaries). Sequences are right-padded either way; under the causal
mask no real token sees padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_p3o.parallel.context import SequenceShard
from megatron_p3o.parallel.packing import SequenceCost, pack
from megatron_p3o.types import ScoredSample

# Shape legend: B rows (sequences, or 1 when packed), S positions of a row on this context rank,
# N sequences of a packed row, T response tokens of the microbatch on this context rank.


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """One microbatch on this rank's device. T may be 0; B and S are at least 1.

    A microbatch without samples still holds one dummy sequence, so that every rank runs the same
    number of forward passes and joins the same collectives.
    """

    input_ids: Tensor  # [B, S] int64
    position_ids: Tensor  # [B, S] int64, counted in the whole sequence
    token_rows: Tensor  # [T] int64
    token_cols: Tensor  # [T] int64
    token_samples: Tensor  # [T] int64, index into `samples`
    token_positions: Tensor  # [T] int64, index into the sample's response
    labels: Tensor  # [T] int64
    rollout_logprobs: Tensor  # [T] float32
    advantages: Tensor  # [T] float32
    token_weights: Tensor  # [T] float32
    samples: tuple[ScoredSample, ...]
    """The same on all context ranks."""
    cu_seqlens: Tensor | None = None
    """[N + 1] int32: where the sequences of a packed row begin and end, padding included, before
    it is cut over context ranks; None for a padded microbatch."""
    max_seqlen: int = 0
    """Longest sequence of a packed row, padding included, before it is cut."""
    proximal_logprobs: Tensor | None = None
    """[T] float32; None while the present weights are those that first consume the batch."""
    reference_logprobs: Tensor | None = None
    """[T] float32, of the frozen reference model; None without a reference KL."""
    routed_experts: Tensor | None = None
    """[B, S, M, K] int16: the experts of the rollout at every position, per mixture-of-experts
    layer; -1 where there is no token. None unless they are replayed."""

    @property
    def num_tokens(self) -> int:
        return self.labels.numel()

    def proximal(self, logprobs: Tensor) -> Tensor:
        """Log-probs under the weights that first consumed the batch, [T], no gradient.

        Args:
            logprobs: under the present weights.
        """
        return logprobs.detach() if self.proximal_logprobs is None else self.proximal_logprobs

    def with_proximal(self, proximal_logprobs: Tensor) -> "Microbatch":
        """The same microbatch, carrying the log-probs with which it was first consumed."""
        return replace(self, proximal_logprobs=proximal_logprobs)

    def with_reference(self, reference_logprobs: Tensor) -> "Microbatch":
        """The same microbatch, carrying the reference model's log-probs."""
        return replace(self, reference_logprobs=reference_logprobs)

    def locate_token(self, index: int) -> tuple[str, int]:
        """(sample name, response position) of entry `index` of the [T] tensors."""
        scored = self.samples[int(self.token_samples[index])]
        return scored.sample.name, int(self.token_positions[index])


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingPlan:
    """How samples are packed."""

    max_tokens: int
    """Budget of a microbatch, padding included, over all context ranks."""
    cost: SequenceCost


def deal(samples: Sequence[ScoredSample], data_size: int) -> list[list[ScoredSample]]:
    """Share samples over `data_size` ranks, longest first and in snake order.

    Each rank gets the same number of samples up to one, and its own are sorted by length, so that
    neighbours pad little.
    """
    ordered = sorted(samples, key=lambda s: -sequence_length(s))
    shares: list[list[ScoredSample]] = [[] for _ in range(data_size)]
    for index, sample in enumerate(ordered):
        round_, place = divmod(index, data_size)
        shares[place if round_ % 2 == 0 else data_size - 1 - place].append(sample)
    return shares


def make_microbatches(
    samples: Sequence[ScoredSample],
    *,
    microbatch_size: int,
    data_rank: int,
    data_size: int,
    device: torch.device,
    shard: SequenceShard,
    packing: PackingPlan | None,
    count_multiple: int = 1,
    experts_shape: tuple[int, int] | None = None,
) -> list[Microbatch]:
    """This rank's microbatches of an optimizer step.

    Every rank gets the same number of microbatches; a rank with fewer samples gets empty ones.

    Args:
        samples: of the whole step, the same on every rank.
        microbatch_size: sequences of a padded microbatch.
        data_rank: of this rank.
        data_size: data-parallel ranks.
        device: where the tensors are put.
        shard: this context rank's share of every sequence.
        packing: None for padded microbatches.
        count_multiple: the number of microbatches is a multiple of it.
        experts_shape: (M, K) of the samples' routed experts; None leaves these out.
    """
    if packing is not None:
        packs = pack(
            [shard.padded(sequence_length(scored)) for scored in samples],
            max_tokens=packing.max_tokens,
            num_ranks=data_size,
            cost=packing.cost,
        )[data_rank]
        chosen = [[samples[index] for index in members] for members in packs]
    else:
        shares = deal(samples, data_size)
        num_microbatches = max(1, -(-max(map(len, shares)) // microbatch_size))
        chosen = [
            shares[data_rank][index * microbatch_size : (index + 1) * microbatch_size]
            for index in range(num_microbatches)
        ]
    chosen += [[] for _ in range(-len(chosen) % count_multiple)]
    return [
        collate(members, device, shard, packed=packing is not None, experts_shape=experts_shape)
        for members in chosen
    ]


def collate(
    samples: Sequence[ScoredSample],
    device: torch.device,
    shard: SequenceShard,
    *,
    packed: bool,
    experts_shape: tuple[int, int] | None = None,
) -> Microbatch:
    """Pad, align and cut; `samples` may be empty."""
    lengths = [shard.padded(sequence_length(scored)) for scored in samples] or [shard.padded(0)]
    if not packed:
        lengths = [max(lengths)] * len(lengths)
    positions = [shard.positions(length) for length in lengths]
    rows = [_row(scored, length) for scored, length in zip(samples, lengths, strict=False)]
    rows = rows or [torch.zeros(lengths[0], dtype=torch.int64)]
    ids = [row[local] for row, local in zip(rows, positions, strict=True)]
    shape = (1, -1) if packed else (len(lengths), -1)
    tokens = _select_tokens(samples, positions)
    if packed:  # one row: its columns go on where the sequence before ends
        starts = torch.tensor([0, *map(len, positions)]).cumsum(0)
        tokens["token_cols"] += starts[tokens["token_samples"]]
        tokens["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        tokens["token_rows"] = torch.zeros_like(tokens["token_samples"])
    else:
        tokens["token_rows"] = tokens["token_samples"]
    if experts_shape is not None:
        experts = [
            torch.full((length, *experts_shape), -1, dtype=torch.int16) for length in lengths
        ]
        for whole, scored in zip(experts, samples, strict=False):
            assert scored.sample.routed_experts is not None
            whole[: sequence_length(scored)] = scored.sample.routed_experts.tensor()
        local = [whole[places] for whole, places in zip(experts, positions, strict=True)]
        tokens["routed_experts"] = torch.cat(local).view(*shape, *experts_shape)
    tokens["input_ids"] = torch.cat(ids).view(shape)
    tokens["position_ids"] = torch.cat(positions).view(shape)
    return Microbatch(
        samples=tuple(samples),
        max_seqlen=max(lengths) if packed else 0,
        **{name: value.to(device) for name, value in tokens.items()},
    )


def _select_tokens(
    samples: Sequence[ScoredSample], positions: Sequence[Tensor]
) -> dict[str, Tensor]:
    """The response tokens predicted at this rank's positions, sample after sample; [T] fields."""
    cols, responses = [], []
    for scored, local in zip(samples, positions, strict=False):
        response = local - (len(scored.sample.prompt_ids) - 1)
        here = (response >= 0) & (response < scored.sample.num_response_tokens)
        cols.append(here.nonzero()[:, 0])
        responses.append(response[here])
    counts = torch.tensor([len(response) for response in responses], dtype=torch.int64)

    def of_tokens(values: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
        parts = [
            torch.tensor(of_sample, dtype=dtype)[response]
            for of_sample, response in zip(values, responses, strict=True)
        ]
        return torch.cat([torch.zeros(0, dtype=dtype), *parts])

    def of_samples(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).repeat_interleave(counts)

    none = torch.zeros(0, dtype=torch.int64)
    return {
        "token_samples": of_samples(range(len(samples)), torch.int64),
        "token_cols": torch.cat([none, *cols]),
        "token_positions": torch.cat([none, *responses]),
        "labels": of_tokens([s.sample.response_ids for s in samples], torch.int64),
        "rollout_logprobs": of_tokens([s.sample.rollout_logprobs for s in samples], torch.float32),
        "advantages": of_samples([s.advantage for s in samples], torch.float32),
        "token_weights": of_samples([s.token_weight for s in samples], torch.float32),
    }


def _row(scored: ScoredSample, length: int) -> Tensor:
    """The tokens that enter the model, padded with 0 to `length`."""
    tokens = (scored.sample.prompt_ids + scored.sample.response_ids)[:-1]
    row = torch.zeros(length, dtype=torch.int64)
    row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    return row


def sequence_length(scored: ScoredSample) -> int:
    """Tokens that enter the model, without padding."""
    return len(scored.sample.prompt_ids) + scored.sample.num_response_tokens - 1
