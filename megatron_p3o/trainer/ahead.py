"""Rollouts a fixed number of batches ahead of training, without anything running at the same time.

The schedule of a fully asynchronous run as a study needs it: every batch is exactly as stale as
asked for, and the run can be repeated bit for bit. Batch n is generated with the weights of step
n - ahead; before the first step there are no others than the first weights.

    consumes   one batch a step, the oldest
    produces   one batch a step, once `ahead` are waiting
    waits for  nothing but its own generation

What waits is not in checkpoints: a resumed run generates it again, with the weights it resumes
from, so its first batches are less stale than those of the run that was not interrupted.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_p3o.trainer.experience import Collected, RolloutSource, Weights
from megatron_p3o.types import Sample


class AheadRollouts:
    """A rollout source whose batches are `ahead` steps old when they are taken."""

    def __init__(self, source: RolloutSource, *, ahead: int, num_steps: int) -> None:
        """
        Args:
            source: generates; its batches may be collected before their step.
            ahead: batches that wait.
            num_steps: of the run; nothing is generated for later ones.
        """
        self._source = source
        self._ahead = ahead
        self._num_steps = num_steps
        self._waiting: deque[tuple[dict[str, Any], Collected]] = deque()
        """Batches with the source's state from before they were drawn."""

    def collect(self, step: int) -> Collected:
        """The batch of `step`; see `RolloutSource`."""
        while len(self._waiting) <= self._ahead:
            coming = step + len(self._waiting)
            if coming == self._num_steps:
                break
            state = self._source.state()
            self._waiting.append((state, self._source.collect(coming)))
        return self._waiting.popleft()[1]

    def publish(self, weights: Weights, version: int) -> None:
        self._source.publish(weights, version)

    def parity_samples(self) -> Mapping[str, Sequence[Sample]]:
        return self._source.parity_samples()

    def state(self) -> dict[str, Any]:
        """From before the oldest batch that waits was drawn."""
        return self._waiting[0][0] if self._waiting else self._source.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self._waiting.clear()
        self._source.load_state(state)

    def close(self) -> None:
        self._source.close()
