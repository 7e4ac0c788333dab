"""Finished rollout batches that wait to be trained on, and the bound on their age."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_p3o.types import SampleGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """A batch, told apart by age."""

    fresh: tuple[SampleGroup, ...]
    stale: tuple[SampleGroup, ...]
    """Sampled, in part at least, with weights older than the bound; not to be trained on."""


class StalenessBuffer:
    """Holds each step's groups until that step trains on them.

    Steps are taken in their own order, not in that in which they were finished: the batch that
    finishes first has the short responses. Generation starts at most `max_staleness` steps ahead,
    so nothing becomes too old while all goes well; the bound is checked all the same.
    """

    def __init__(self, *, max_lag: int) -> None:
        """
        Args:
            max_lag: greatest number of weight versions between the oldest token's and those that
                the batch is trained on.
        """
        self._max_lag = max_lag
        self._batches: dict[int, list[SampleGroup]] = {}

    def put(self, step: int, groups: Sequence[SampleGroup]) -> None:
        """Add groups to a step's batch."""
        self._batches.setdefault(step, []).extend(groups)

    def take(self, step: int, weight_version: int) -> Taken:
        """Remove a step's batch.

        Args:
            step: that is about to train.
            weight_version: of the trainer now.
        """
        groups = self._batches.pop(step, [])
        oldest = weight_version - self._max_lag
        is_fresh = [all(s.weight_version_min >= oldest for s in g.samples) for g in groups]
        return Taken(
            fresh=tuple(g for g, ok in zip(groups, is_fresh, strict=True) if ok),
            stale=tuple(g for g, ok in zip(groups, is_fresh, strict=True) if not ok),
        )
