"""Samples to padded microbatches, dealt over the data-parallel ranks.

The label alignment of the whole system happens here and nowhere else: a sequence of P prompt and
R response tokens enters the model as its first P + R - 1 tokens (the last one predicts nothing),
and response token i is predicted at position P - 1 + i. `token_rows` and `token_cols` select those
positions from the model's [B, S] output, so everything behind them is `[T]`, without padding.

Sequences are right-padded; under the causal mask no real token sees padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_p3o.types import ScoredSample

# Shape legend: B sequences, S padded length, T response tokens of the microbatch.


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """One microbatch on this rank's device. T may be 0; B and S are at least 1.

    A microbatch without samples still holds one dummy sequence, so that every rank runs the same
    number of forward passes and joins the same collectives.
    """

    input_ids: Tensor  # [B, S] int64
    position_ids: Tensor  # [B, S] int64
    token_rows: Tensor  # [T] int64
    token_cols: Tensor  # [T] int64
    labels: Tensor  # [T] int64
    rollout_logprobs: Tensor  # [T] float32
    advantages: Tensor  # [T] float32
    token_weights: Tensor  # [T] float32
    samples: tuple[ScoredSample, ...]
    proximal_logprobs: Tensor | None = None
    """[T] float32; None while the present weights are those that first consume the batch."""

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

    def locate_token(self, index: int) -> tuple[str, int]:
        """(sample name, response position) of entry `index` of the [T] tensors."""
        for scored in self.samples:
            if index < scored.sample.num_response_tokens:
                return scored.sample.name, index
            index -= scored.sample.num_response_tokens
        raise IndexError(index)


def deal(samples: Sequence[ScoredSample], data_size: int) -> list[list[ScoredSample]]:
    """Share samples over `data_size` ranks, longest first and in snake order.

    Each rank gets the same number of samples up to one, and its own are sorted by length, so that
    neighbours pad little.
    """
    ordered = sorted(samples, key=lambda s: -_sequence_length(s))
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
    length_multiple: int = 1,
    count_multiple: int = 1,
) -> list[Microbatch]:
    """This data-parallel rank's microbatches of an optimizer step.

    Every rank gets the same number of microbatches; a rank with fewer samples gets empty ones.

    Args:
        samples: of the whole step, the same on every rank.
        microbatch_size: sequences of a microbatch.
        data_rank: of this rank.
        data_size: data-parallel ranks.
        device: where the tensors are put.
        length_multiple: padded lengths are a multiple of it.
        count_multiple: the number of microbatches is a multiple of it.
    """
    shares = deal(samples, data_size)
    num_microbatches = max(1, -(-max(map(len, shares)) // microbatch_size))
    num_microbatches = -(-num_microbatches // count_multiple) * count_multiple
    mine = shares[data_rank]
    return [
        collate(
            mine[index * microbatch_size : (index + 1) * microbatch_size], device, length_multiple
        )
        for index in range(num_microbatches)
    ]


def collate(
    samples: Sequence[ScoredSample], device: torch.device, length_multiple: int = 1
) -> Microbatch:
    """Pad and align; `samples` may be empty."""
    length = max([1, *map(_sequence_length, samples)])
    length = -(-length // length_multiple) * length_multiple
    input_ids = torch.zeros(max(1, len(samples)), length, dtype=torch.int64)
    rows: list[int] = []
    cols: list[int] = []
    labels: list[int] = []
    rollout_logprobs: list[float] = []
    advantages: list[float] = []
    weights: list[float] = []
    for row, scored in enumerate(samples):
        sample = scored.sample
        tokens = (sample.prompt_ids + sample.response_ids)[:-1]
        input_ids[row, : len(tokens)] = torch.tensor(tokens)
        count = sample.num_response_tokens
        first = len(sample.prompt_ids) - 1
        rows += [row] * count
        cols += range(first, first + count)
        labels += sample.response_ids
        rollout_logprobs += sample.rollout_logprobs
        advantages += [scored.advantage] * count
        weights += [scored.token_weight] * count
    return Microbatch(
        input_ids=input_ids.to(device),
        position_ids=torch.arange(length).expand_as(input_ids).contiguous().to(device),
        token_rows=torch.tensor(rows, dtype=torch.int64, device=device),
        token_cols=torch.tensor(cols, dtype=torch.int64, device=device),
        labels=torch.tensor(labels, dtype=torch.int64, device=device),
        rollout_logprobs=torch.tensor(rollout_logprobs, dtype=torch.float32, device=device),
        advantages=torch.tensor(advantages, dtype=torch.float32, device=device),
        token_weights=torch.tensor(weights, dtype=torch.float32, device=device),
        samples=tuple(samples),
    )


def _sequence_length(scored: ScoredSample) -> int:
    return len(scored.sample.prompt_ids) + scored.sample.num_response_tokens - 1
