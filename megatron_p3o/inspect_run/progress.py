"""What is known of a run that may still go on: how far, how fast, whether it is silent."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

RECENT_STEPS = 10
"""Steps whose median is the usual step time."""
SILENT_STEPS = 5
"""Usual step times without a new line after which a run counts as silent."""
_SILENT_AT_LEAST_S = 10.0  # steps of a tiny model take less than a look at them
_ALARMS = 3


class State(Enum):
    WAITING = "waiting for the first step"
    RUNNING = "running"
    SILENT = "silent"
    FINISHED = "finished"


@dataclass(kw_only=True, slots=True)
class Progress:
    """The steps of a run that have been read so far."""

    total: int | None
    """train.steps; None where config.yaml does not say."""
    names: tuple[str, ...]
    """The metrics to keep."""
    series: dict[str, dict[int, float]] = field(default_factory=dict)
    """Metric -> step -> value; NaN and infinity included."""
    last_step: int | None = None
    alarms: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=_ALARMS))
    """The last ones: step and text."""

    def add(self, record: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl; a step that is there already is replaced."""
        step = record["step"]
        self.last_step = step
        for name in self.names:
            value = record.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                self.series.setdefault(name, {})[step] = float(value)
        if isinstance(alarm := record.get("alarm"), str):
            self.alarms.append((step, alarm))

    def clear(self) -> None:
        """Forget all steps."""
        self.series.clear()
        self.alarms.clear()
        self.last_step = None

    @property
    def num_done(self) -> int:
        """Steps that are done, those before a gap in the file included."""
        return 0 if self.last_step is None else self.last_step + 1

    def usual_step_s(self) -> float | None:
        """Median seconds of the last steps; None without any."""
        times = [v for v in self.series.get("time/step_s", {}).values() if math.isfinite(v)]
        return statistics.median(times[-RECENT_STEPS:]) if times else None

    def remaining_s(self) -> float | None:
        """Seconds until the last step is done; None where it cannot be told."""
        usual = self.usual_step_s()
        if usual is None or self.total is None:
            return None
        return max(0, self.total - self.num_done) * usual

    def state(self, silence_s: float) -> State:
        """
        Args:
            silence_s: seconds since the last line was written.
        """
        if self.total is not None and self.num_done >= self.total:
            return State.FINISHED
        usual = self.usual_step_s()
        if usual is None:
            return State.WAITING if self.last_step is None else State.RUNNING
        is_silent = silence_s > max(SILENT_STEPS * usual, _SILENT_AT_LEAST_S)
        return State.SILENT if is_silent else State.RUNNING


def duration(seconds: float) -> str:
    """Seconds in words: 0.4 s, 40 s, 12 min, 3 h 5 min, 2 d 4 h."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"
