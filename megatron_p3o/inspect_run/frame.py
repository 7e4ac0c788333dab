"""One picture of a run in a terminal."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_p3o.inspect_run.plain import plain
from megatron_p3o.inspect_run.progress import Progress, State, duration

_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_WIDTH = 32  # the table then fits 80 columns
# Metric, label, digits.
_ROWS = (
    ("reward/mean", "reward", 3),
    ("ess/step", "ESS", 4),
    ("mismatch/k3", "mismatch k3", 6),
    ("ratio/mean", "mean ratio", 4),
    ("entropy/mean", "entropy", 3),
    ("grad_norm", "grad norm", 3),
    ("response/length_mean", "response length", 1),
    ("time/step_s", "step time (s)", 1),
)
_PARTS = ("rollout", "score", "train", "sync", "checkpoint")
NAMES = (*(name for name, _, _ in _ROWS), *(f"time/{part}_s" for part in _PARTS))
"""The metrics that a frame shows."""
_STYLES = {
    State.WAITING: "dim",
    State.RUNNING: "green",
    State.SILENT: "yellow",
    State.FINISHED: "bold green",
}


def frame(title: str, progress: Progress, silence_s: float) -> RenderableType:
    """The picture.

    Args:
        title: the run dir.
        progress: what has been read.
        silence_s: seconds since the last line was written.
    """
    parts: list[RenderableType] = [_headline(title, progress, silence_s)]
    if progress.total is not None:
        done = min(progress.num_done, progress.total)
        bar = Table.grid()  # a bar alone does not end its line
        bar.add_row(ProgressBar(total=progress.total, completed=done, width=60))
        parts.append(bar)
    if progress.last_step is not None:
        parts.append(_table(progress))
        parts.append(_time_parts(progress))
    parts += [
        Text(f"alarm at step {step}: {plain(text)}", style="yellow")
        for step, text in progress.alarms
    ]
    return Group(*parts)


def sparkline(values: Sequence[float], width: int = _WIDTH) -> str:
    """Blocks from the least to the greatest value; equal values are in the middle.

    More values than columns are averaged in runs of nearly equal length. NaN and infinity leave
    no mark; a column of nothing else is blank.
    """
    columns = min(width, len(values))
    cuts = [column * len(values) // columns for column in range(columns + 1)] if columns else [0]
    means = []
    for start, stop in itertools.pairwise(cuts):
        finite = [value for value in values[start:stop] if math.isfinite(value)]
        means.append(statistics.fmean(finite) if finite else math.nan)
    shown = [mean for mean in means if math.isfinite(mean)]
    low, high = (min(shown), max(shown)) if shown else (0.0, 0.0)
    return "".join(_block(mean, low, high) for mean in means)


def _block(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return " "
    if high == low:
        return _BLOCKS[3]
    return _BLOCKS[min(int((value - low) / (high - low) * len(_BLOCKS)), len(_BLOCKS) - 1)]


def _headline(title: str, progress: Progress, silence_s: float) -> Text:
    state = progress.state(silence_s)
    total = "?" if progress.total is None else progress.total
    line = Text.assemble((plain(title), "bold"), f"  {progress.num_done}/{total} steps  ")
    usual = progress.usual_step_s()
    if state is State.SILENT and usual is not None:
        said = f"silent for {duration(silence_s)}; steps usually take {duration(usual)}"
    else:
        said = state.value
    line.append(said, style=_STYLES[state])
    remaining = progress.remaining_s()
    if state is State.RUNNING and remaining is not None:
        line.append(f"  ETA {duration(remaining)}")
    return line


def _table(progress: Progress) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("metric")
    table.add_column("latest", justify="right")
    table.add_column("over all steps", no_wrap=True)
    table.add_column("least", justify="right")
    table.add_column("greatest", justify="right")
    for name, label, digits in _ROWS:
        series = progress.series.get(name)
        if not series:
            continue
        values = [series[step] for step in sorted(series)]
        finite = [value for value in values if math.isfinite(value)] or [math.nan]
        table.add_row(
            label,
            f"{_latest(progress, series):.{digits}f}",
            sparkline(values),
            f"{min(finite):.{digits}f}",
            f"{max(finite):.{digits}f}",
        )
    return table


def _latest(progress: Progress, series: Mapping[int, float]) -> float:
    """Of the last step, or of the last that has the metric."""
    step = progress.last_step
    return series[max(series) if step is None or step not in series else step]


def _time_parts(progress: Progress) -> Text:
    found = {
        part: _latest(progress, progress.series[f"time/{part}_s"])
        for part in _PARTS
        if f"time/{part}_s" in progress.series
    }
    words = "  ".join(f"{part} {seconds:.1f}" for part, seconds in found.items())
    return Text(f"of which (s)    {words}" if found else "")
