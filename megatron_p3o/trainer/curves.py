"""The figure that a finished run leaves behind: reward, ESS, mean ratio and gradient norm."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Name, label, and a range to show at least: rounding must not fill a panel.
_PANELS = (
    ("reward/mean", "mean reward", (0.0, 1.0)),
    ("ess/step", "normalised ESS", (0.0, 1.0)),
    ("ratio/mean", "mean policy ratio", (0.9, 1.1)),
    ("grad_norm", "gradient norm", (0.0, 1.0)),
)


def draw_curves(records: Sequence[Mapping[str, float]], path: Path, *, title: str) -> None:
    """Write a PNG of the run's curves.

    Args:
        records: lines of metrics.jsonl, in step order.
        path: the PNG file.
        title: above the panels.
    """
    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    steps = [record["step"] + 1 for record in records]
    for axes, (name, label, (low, high)) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        values = [record[name] for record in records]
        axes.plot(steps, values, marker="o", markersize=3)
        margin = 0.04 * (max(high, *values) - min(low, *values))
        axes.set_ylim(min(low, *values) - margin, max(high, *values) + margin)
        axes.set_title(label, loc="left")
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
