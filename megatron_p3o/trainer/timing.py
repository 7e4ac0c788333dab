"""Wall-clock time of the named phases of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("rollout", "score", "train", "sync", "checkpoint")
"""Of every step; an evaluation is a further phase, `eval`, of the steps that have one."""


class StepTimer:
    """Adds up the seconds of each phase of one step, on this rank."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        spent = self._seconds.get(name, 0.0)
        self._seconds[name] = spent + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """`time/<phase>_s` of each phase, and `time/step_s` since the timer was made."""
        phases = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        return {**phases, "time/step_s": time.perf_counter() - self._start}
