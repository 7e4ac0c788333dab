"""The data that travels through a step: samples, token statistics, loss output.

Shape legend: G samples per prompt, B sequences, S padded sequence length, T valid response tokens
of one microbatch (packed into one axis, sequence after sequence; with context parallelism those
predicted at this context rank's positions).

Alignment rule (stated here, applied once, in `parallel.batching`): every `[T]` tensor is
label-aligned. Entry `t` speaks of predicting response token `labels[t]`; the hidden state that
predicts it has already been selected. No code shifts by one anywhere else.
"""

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedExperts:
    """The experts that a mixture-of-experts model sent one sample's tokens to.

    [N, M, K]: N tokens that enter the model (prompt and response without the last token, which
    predicts nothing), M mixture-of-experts layers in order, K experts of the token in any order.
    """

    shape: tuple[int, int, int]
    data: str
    """base64 of the expert indices as little-endian int16, row-major."""

    def __post_init__(self) -> None:
        try:
            num_bytes = len(base64.b64decode(self.data, validate=True))
        except binascii.Error as error:
            raise ValueError(f"routed_experts.data is not base64 ({error})") from error
        if len(self.shape) != 3 or num_bytes != 2 * math.prod(self.shape):
            raise ValueError(
                f"routed_experts has {num_bytes} bytes for shape {tuple(self.shape)}; it needs "
                "2 for each of tokens x layers x experts per token"
            )

    @classmethod
    def from_tensor(cls, experts_NMK: Tensor) -> "RoutedExperts":
        values = experts_NMK.to("cpu", torch.int16).contiguous().numpy().astype("<i2")
        n, m, k = experts_NMK.shape
        return cls(shape=(n, m, k), data=base64.b64encode(values.tobytes()).decode())

    def tensor(self) -> Tensor:
        """[N, M, K] int16."""
        values = np.frombuffer(base64.b64decode(self.data), dtype="<i2").astype(np.int16)
        return torch.from_numpy(values).view(self.shape)


class VersionSpan(NamedTuple):
    """Consecutive response tokens that were sampled with the weights of one version."""

    version: int
    start: int
    """First token of the span, counted in the response."""
    stop: int
    """One past the last."""


def check_spans(spans: Sequence[VersionSpan], num_tokens: int) -> None:
    """Raises ValueError unless the spans follow each other from the first token to the last."""
    starts = [0, *(span.stop for span in spans[:-1])]
    if (
        any(
            span.start != start or span.stop <= start
            for span, start in zip(spans, starts, strict=True)
        )
        or spans[-1].stop != num_tokens
    ):
        raise ValueError(
            f"version spans {[tuple(span) for span in spans]} must cover the {num_tokens} tokens "
            "of the response one after the other"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One response to one prompt, as the rollout engine produced it.

    `rollout_logprobs[i]` is the log-prob (nats) of `response_ids[i]` under the distribution that
    it was sampled from: logits divided by the temperature. `response_ids` includes the
    end-of-sequence token when `finish_reason` is "stop". `weight_version_min/max` are the least
    and greatest weight version that any of its tokens was sampled with.

    Example:
        Sample(prompt_id="17", sample_index=3, prompt_ids=(1, 4, 9), response_ids=(55, 2),
               rollout_logprobs=(-0.11, -0.02), finish_reason="stop",
               weight_version_min=6, weight_version_max=6, reward=1.0)
    """

    prompt_id: str
    sample_index: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    finish_reason: FinishReason
    weight_version_min: int
    weight_version_max: int
    prompt_text: str = ""
    response_text: str = ""
    reward: float | None = None
    """None when the reward raised or timed out; such a sample is left out of the loss."""
    reward_error: str | None = None
    routed_experts: RoutedExperts | None = None
    """Of the rollout engine's forward passes; None where it does not report them."""
    version_spans: tuple[VersionSpan, ...] = ()
    """Which tokens each version sampled, when the weights changed on the way; else empty."""

    def __post_init__(self) -> None:
        if len(self.response_ids) != len(self.rollout_logprobs):
            raise ValueError(
                f"sample {self.name}: {len(self.response_ids)} response tokens but "
                f"{len(self.rollout_logprobs)} rollout log-probs; one log-prob per token is needed"
            )
        num_inputs = len(self.prompt_ids) + len(self.response_ids) - 1
        if self.routed_experts is not None and self.routed_experts.shape[0] != num_inputs:
            raise ValueError(
                f"sample {self.name}: routed_experts has {self.routed_experts.shape[0]} tokens but "
                f"{num_inputs} enter the model; all but the last token are needed"
            )
        if self.version_spans:
            check_spans(self.version_spans, len(self.response_ids))

    @property
    def name(self) -> str:
        """`prompt_id/sample_index`, how errors and records name this sample."""
        return f"{self.prompt_id}/{self.sample_index}"

    @property
    def num_response_tokens(self) -> int:
        return len(self.response_ids)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; `from_json` gives back an equal sample (floats survive exactly)."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Sample":
        """Build from `to_json` output; unknown keys are ignored (records carry a step as well).

        Raises:
            KeyError: a required field is missing.
        """
        known = {name: record[name] for name in cls.__dataclass_fields__ if name in record}
        for name in ("prompt_ids", "response_ids", "rollout_logprobs"):
            known[name] = tuple(record[name])
        if (experts := known.get("routed_experts")) is not None:
            known["routed_experts"] = RoutedExperts(
                shape=tuple(experts["shape"]), data=experts["data"]
            )
        known["version_spans"] = tuple(VersionSpan(*s) for s in known.get("version_spans", ()))
        return cls(**known)

    def with_reward(self, reward: float | None, error: str | None = None) -> "Sample":
        return replace(self, reward=reward, reward_error=error)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleGroup:
    """All G samples of one prompt; the unit over which group-relative advantages are taken."""

    prompt_id: str
    samples: tuple[Sample, ...]  # [G]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredSample:
    """A sample with its advantage: what the trainer consumes.

    `advantage` is broadcast to the response's tokens. `token_weight` multiplies each token's loss
    term before the sum, which is how normalisations other than the token mean stay exact under
    any split into microbatches.
    """

    sample: Sample
    advantage: float
    token_weight: float = 1.0
    sequence: int = 0
    """Place among the sequences of its optimizer step; what sequence-level sums are kept by."""
    lag: int = 0
    """Weight versions between the oldest token's sampling and the first use of the batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceStats:
    """What each token knows of its whole sequence. All tensors are `[T]`, without gradient.

    They are inputs of a loss, since a microbatch or a context shard may hold only a part of a
    sequence; `algorithms.sequences` makes them from sums that merge exactly.
    """

    log_ratios: Tensor
    """Mean of log(pi / b) over the response tokens of the token's sequence (nats)."""
    mismatch: Tensor
    """Mean of log(p / b) over the same tokens; p is the proximal policy."""
    lengths: Tensor
    """Response tokens of the token's sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenStats:
    """Per-token inputs of a loss for one microbatch. All tensors are `[T]`, label-aligned.

    Every entry is a valid response token: padding was left out when the tokens were selected, so
    there is no mask. T may be 0.
    """

    logprobs: Tensor
    """Trainer log-probs of the sampled tokens; carries gradient in the train pass."""
    rollout_logprobs: Tensor
    """The rollout engine's log-probs of the same tokens (behaviour policy)."""
    advantages: Tensor
    token_weights: Tensor
    """Multiplies each token's loss term; all ones for the token mean."""
    proximal_logprobs: Tensor | None = None
    """Trainer log-probs when the rollout batch was first consumed; no gradient."""
    entropy: Tensor | None = None
    """Entropy of the trainer's distribution at each token (nats); None unless asked for."""
    sequences: SequenceStats | None = None
    """None unless the objective needs it; see `algorithms.required_inputs`."""
    reference_logprobs: Tensor | None = None
    """Log-probs under the frozen reference model; no gradient. None without a reference KL."""

    @property
    def num_tokens(self) -> int:
        return self.logprobs.numel()

    @classmethod
    def empty(cls) -> "TokenStats":
        """No tokens at all, every field present."""
        none = torch.zeros(0)
        return cls(
            logprobs=none,
            rollout_logprobs=none,
            advantages=none,
            token_weights=none,
            proximal_logprobs=none,
            entropy=none,
            sequences=SequenceStats(log_ratios=none, mismatch=none, lengths=none),
            reference_logprobs=none,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """What a loss returns: sums over the microbatch's tokens, never means.

    The caller divides once by the token count of the whole optimizer step. `metrics` are sums
    over tokens too (no gradient), reduced by addition and divided by the same count.
    """

    loss_sum: Tensor  # [] with gradient
    num_tokens: int
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [] detached


class BucketEntry(NamedTuple):
    """One tensor of a `WeightBucket`."""

    name: str
    """Hugging Face name."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First byte in the bucket; a multiple of the dtype's size."""
    stop: int
    """One past the last byte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightBucket:
    """Tensors of a model, end to end in one piece of memory, on their way to rollout servers.

    There are no gaps, so the places follow from dtypes and shapes in the order of the entries.

    Example:
        entry = bucket.entries[0]
        bucket.data[entry.start : entry.stop].view(entry.dtype).view(entry.shape)
    """

    entries: tuple[BucketEntry, ...]
    data: Tensor
    """[bytes] uint8, on the device of the tensors."""
    is_last: bool
    """Whether it completes the model."""
