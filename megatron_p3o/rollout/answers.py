"""The data's own answers in the place of a rollout engine's samples, for supervised training."""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from megatron_p3o.rollout.engine import Generation, GenerationRequest
from megatron_p3o.types import VersionSpan


class AnswerEngine:
    """Gives the answer of each prompt; every sample of a prompt is the same.

    Nothing was sampled, so log-probs are 0: the data gives its answer with probability 1.
    """

    def __init__(self, answer_ids: Callable[[str], tuple[int, ...]], max_new_tokens: int) -> None:
        """
        Args:
            answer_ids: token ids of an answer with its end, by prompt id.
            max_new_tokens: longer answers are cut.
        """
        self._answer_ids = answer_ids
        self._max_new_tokens = max_new_tokens
        self._weight_version = 0

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Only the version is noted."""
        self._weight_version = version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """See `RolloutEngine.generate`."""
        return [
            self._generation(request, index)
            for request in requests
            for index in range(request.num_samples)
        ]

    def close(self) -> None:
        """Nothing to release."""

    def _generation(self, request: GenerationRequest, sample_index: int) -> Generation:
        ids = self._answer_ids(request.prompt_id)
        kept = ids[: self._max_new_tokens]
        return Generation(
            prompt_id=request.prompt_id,
            sample_index=sample_index,
            response_ids=kept,
            logprobs=(0.0,) * len(kept),
            finish_reason="stop" if len(kept) == len(ids) else "length",
            version_spans=(VersionSpan(self._weight_version, 0, len(kept)),),
        )
