"""What a rollout engine is asked for and what it gives back."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_p3o.types import FinishReason, RoutedExperts, VersionSpan


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """All samples of one prompt in one training step."""

    prompt_id: str
    prompt_ids: tuple[int, ...]
    num_samples: int
    step: int
    """Training step; with the prompt id it makes the sampling noise unique."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One sampled response.

    `logprobs[i]` is the log-prob (nats) of `response_ids[i]` under the distribution it was drawn
    from: logits divided by the temperature. The end-of-sequence token is part of the response.
    """

    prompt_id: str
    sample_index: int
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    """Which tokens each weight version sampled."""
    routed_experts: RoutedExperts | None = None
    """Where each token went in a mixture-of-experts model, when it was asked for."""


class RolloutEngine(Protocol):
    """Generates under the weights it was last given."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Responses in request order, each request's samples in index order."""
        ...

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take a whole model by Hugging Face name.

        Raises:
            RunError: a tensor is missing, unknown or of another shape; the engine must not be
                used for training then.
        """
        ...

    def close(self) -> None: ...
