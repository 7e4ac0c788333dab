"""Metrics of a step: each value says how several optimizer steps of one rollout batch combine.

Sums over tokens are completed over ranks by `ParallelContext.sum_tokens` before they come here, so
every rank holds the same numbers and no further reduction over ranks exists.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple, Protocol


class Over(Enum):
    """How the values of several optimizer steps become one."""

    MEAN = "mean"
    MAX = "max"
    MIN = "min"
    SUM = "sum"
    LAST = "last"


class Metric(NamedTuple):
    """A value and how it combines over optimizer steps.

    Example:
        Metric(0.93, Over.MEAN)
    """

    value: float
    over: Over = Over.MEAN


_COMBINE: Mapping[Over, Callable[[Sequence[float]], float]] = {
    Over.MEAN: statistics.fmean,
    Over.MAX: max,
    Over.MIN: min,
    Over.SUM: sum,
    Over.LAST: lambda values: values[-1],
}


def combine(updates: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    """One value per name from the metrics of every optimizer step, over the steps that have it."""
    named = {name: metric.over for update in updates for name, metric in update.items()}
    return {
        name: _COMBINE[over]([update[name].value for update in updates if name in update])
        for name, over in named.items()
    }


class MetricSink(Protocol):
    """Takes the metrics of each finished step, on rank 0. All are numbers but `alarm`, a text
    that is there when something left its band."""

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """metrics.jsonl: one JSON object a step, flushed when the step ends."""

    def __init__(self, path: Path, *, first_step: int) -> None:
        """
        Args:
            path: the file; lines of steps before `first_step` are kept, later ones dropped, which
                is what a resumed run needs.
            first_step: the next step that will be written.
        """
        kept = read_metrics(path, before_step=first_step) if path.exists() else []
        self._file = path.open("w", encoding="utf-8")
        self._file.writelines(json.dumps(line) + "\n" for line in kept)
        self._file.flush()

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """TensorBoard scalars; needs the `tensorboard` extra."""

    def __init__(self, directory: Path, *, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what an interrupted run logged after its last checkpoint.
        self._writer = SummaryWriter(str(directory), purge_step=first_step)

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        for name, value in metrics.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, global_step=step)
            else:
                self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def read_metrics(path: Path, *, before_step: int | None = None) -> list[dict[str, float]]:
    """The complete lines of a metrics.jsonl; a half-written last line is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not text.endswith("\n"):
            break
        line = json.loads(text)
        if before_step is None or line["step"] < before_step:
            lines.append(line)
    return lines
