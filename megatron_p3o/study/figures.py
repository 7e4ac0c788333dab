"""A report's figures: small multiples with one colour per objective throughout.

A bold curve is averaged over the window, then over the runs of an arm that have the step; its band
is their least and greatest. It is dotted where some of the arm's runs have ended already, and a
cross marks the end of a run that is not complete.
"""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogFormatter, MaxNLocator

from megatron_p3o.study.analyze import REWARD, ArmSummary
from megatron_p3o.study.runs import RunSet
from megatron_p3o.study.statistics import band, window_means
from megatron_p3o.study.tables import arm_title, is_emulated_arm

# Okabe and Ito's palette, which colour-blind people can tell apart, without its yellow.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
Style = Literal["-", "--", "-."]
_STYLES: tuple[Style, ...] = ("-", "--", "-.")  # for more groups than colours
_MAX_COLUMNS = 4
_DPI = 110


@dataclass(frozen=True, slots=True)
class Curves:
    """A figure of curves."""

    name: str
    """Of its file."""
    title: str
    metrics: tuple[str, ...]
    """The first is averaged over the window and drawn bold with its band, others thin and step by
    step."""
    log: bool = False


CURVES = (
    Curves("reward", "Mean reward", (REWARD,)),
    Curves("ess", "Normalised ESS of a step", ("ess/step",)),
    Curves("mismatch", "Mismatch of trainer and rollout: k3 (nats)", ("mismatch/k3",), log=True),
    Curves(
        "ratio",
        "Policy ratio: 99 % quantile (bold) and greatest (thin)",
        ("ratio/p99", "ratio/max"),
        log=True,
    ),
    Curves("grad_norm", "Gradient norm before clipping", ("grad_norm", "grad_norm"), log=True),
    Curves("entropy", "Entropy of the policy (nats)", ("entropy/mean",)),
)


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure, drawn."""

    name: str
    title: str
    png: bytes


@dataclass(frozen=True, slots=True)
class Design:
    """Which arm goes to which panel, in which colour; the same in every figure."""

    panels: tuple[str, ...]
    colours: Mapping[str, tuple[str, Style]]
    """Name of a colour group -> its colour and line style."""
    places: Mapping[str, tuple[str, str]]
    """Name of an arm -> its panel and colour group."""


def design(found: RunSet, arms: Sequence[ArmSummary]) -> Design:
    """Objectives are colours, all other axes with more than one setting are panels. Without an
    axis of objectives the first one is."""
    axes = list(found.settings)
    objective = [axis for axis in axes if axis == "objective" or axis.startswith("objective.")]
    coloured = objective or axes[:1]
    panelled = [
        axis
        for axis in axes
        if axis not in coloured and len({arm.labels.get(axis) for arm in arms}) > 1
    ]
    places = {arm.name: (_panel(arm, panelled), _join(arm, coloured) or "all runs") for arm in arms}
    ordered = sorted(arms, key=lambda arm: [_rank(found, arm, axis) for axis in panelled])
    groups = sorted(arms, key=lambda arm: [_rank(found, arm, axis) for axis in coloured])
    names = dict.fromkeys(places[arm.name][1] for arm in groups)
    looks = {
        name: (
            _COLOURS[index % len(_COLOURS)],
            _STYLES[index // len(_COLOURS) % len(_STYLES)],
        )
        for index, name in enumerate(names)
    }
    return Design(tuple(dict.fromkeys(places[arm.name][0] for arm in ordered)), looks, places)


def draw_all(found: RunSet, arms: Sequence[ArmSummary], *, window: int) -> list[Drawing]:
    """Every figure that has something to show.

    Args:
        found: what was read.
        arms: the rows of the report.
        window: steps over which bold curves are averaged.
    """
    plan = design(found, arms)
    drawings = [
        _draw_curves(curves, arms, plan, window)
        for curves in CURVES
        if any(summary.run.series(curves.metrics[0]) for arm in arms for summary in arm.runs)
    ]
    return [*drawings[:1], _draw_final(arms, plan), _draw_collapse(arms, plan), *drawings[1:]]


def _draw_curves(curves: Curves, arms: Sequence[ArmSummary], plan: Design, window: int) -> Drawing:
    columns = min(_MAX_COLUMNS, len(plan.panels))
    rows = math.ceil(len(plan.panels) / columns)
    figure = _figure(max(6.0, 3.4 * columns), 1.1 + 2.7 * rows)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for spare in grid.flat[len(plan.panels) :]:
        spare.set_visible(False)
    for panel, axes in zip(plan.panels, grid.flat, strict=False):
        for arm in arms:
            if plan.places[arm.name][0] == panel:
                _draw_arm(axes, arm, curves, plan.colours[plan.places[arm.name][1]], window)
        axes.set_xlim(left=0)
        axes.set_title(panel, fontsize=11, loc="left")
        axes.grid(alpha=0.25)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    if curves.log and _has_positive(arms, curves.metrics):
        grid.flat[0].set_yscale("log")
        for axes in grid.flat:
            axes.yaxis.set_major_formatter(LogFormatter())
            axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
    for axes in grid[-1]:
        axes.set_xlabel("step")
    _legend(figure, plan)
    return Drawing(curves.name, curves.title, _png(figure))


def _draw_arm(
    axes: Axes, arm: ArmSummary, curves: Curves, look: tuple[str, Style], window: int
) -> None:
    colour, style = look
    for index, metric in enumerate(curves.metrics):
        ends, series = [], []
        for summary in arm.runs:
            curve = summary.run.series(metric)
            if index == 0:
                # A run shorter than the window is shown as it is.
                curve = window_means(curve, window) or curve
            if curve:
                series.append(curve)
                if not summary.run.is_complete:
                    ends.append((max(curve), curve[max(curve)]))
        points = band(series)
        steps, means = [point.step for point in points], [point.mean for point in points]
        whole = [point.mean if point.count == len(series) else math.nan for point in points]
        width = 0.7 if index else 1.8
        marker = "o" if len(points) == 1 else ""  # a line of one point would not be seen
        alpha = 0.55 if index else 1.0
        axes.plot(steps, means, ":", color=colour, linewidth=width, alpha=alpha)
        axes.plot(steps, whole, style, color=colour, linewidth=width, alpha=alpha, marker=marker)
        if index == 0:
            low, high = ([getattr(point, side) for point in points] for side in ("low", "high"))
            axes.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)
            for step, value in ends:
                axes.plot([step], [value], "x", color=colour, markersize=7)


def _draw_final(arms: Sequence[ArmSummary], plan: Design) -> Drawing:
    """A dot a run, and the mean with its interval."""
    figure, axes = _rows_figure(arms)
    for row, arm in enumerate(arms):
        colour, _ = plan.colours[plan.places[arm.name][1]]
        values = [s.values["reward_final"] for s in arm.runs if s.run.is_complete]
        numbers = [value for value in values if value is not None]
        axes.plot(numbers, [row] * len(numbers), "o", color=colour, alpha=0.5, markersize=6)
        mean = arm.values["reward_final"]
        if mean is not None:
            axes.errorbar(
                [mean.mean],
                [row],
                xerr=None if mean.half_width is None else [mean.half_width],
                fmt="|",
                color=colour,
                markersize=16,
                capsize=4,
                linewidth=1.5,
            )
    axes.set_xlabel("mean reward of the last window; bar: mean and 95 % interval")
    return Drawing("final_reward", "Final reward of complete runs", _png(figure))


def _draw_collapse(arms: Sequence[ArmSummary], plan: Design) -> Drawing:
    """A dot a run at the step where it collapsed."""
    figure, axes = _rows_figure(arms)
    runs = [summary.run for arm in arms for summary in arm.runs]
    end = max(1, *(max(run.planned_steps or 0, run.num_steps) for run in runs))
    never = end * 1.08
    axes.axvline(end, color="0.7", linewidth=0.8)
    for row, arm in enumerate(arms):
        colour, _ = plan.colours[plan.places[arm.name][1]]
        for index, summary in enumerate(arm.runs):
            height = row + 0.5 * ((index + 0.5) / len(arm.runs) - 0.5)
            if not summary.is_over:
                axes.plot([summary.run.num_steps], [height], "4", color=colour, markersize=9)
            elif summary.collapsed_at is None:
                axes.plot([never], [height], "o", mfc="white", color=colour, markersize=6)
            else:
                axes.plot([summary.collapsed_at], [height], "o", color=colour, markersize=6)
    axes.set_xlim(-0.02 * end, end * 1.14)
    ticks = [tick for tick in MaxNLocator(integer=True, nbins=7).tick_values(0, end) if tick <= end]
    axes.set_xticks([*ticks, never], [*(f"{tick:.0f}" for tick in ticks), "never"])
    axes.set_xlabel("step of collapse; Y-shaped: the run is not complete")
    return Drawing("collapse", "Where runs collapsed", _png(figure))


def _rows_figure(arms: Sequence[ArmSummary]) -> tuple[Figure, Axes]:
    figure = _figure(10.0, 1.0 + 0.42 * len(arms))
    axes = figure.subplots()
    axes.set_yticks(range(len(arms)), [arm_title(arm) for arm in arms])
    axes.set_ylim(len(arms) - 0.4, -0.6)
    axes.grid(alpha=0.25)
    return figure, axes


def _figure(width: float, height: float) -> Figure:
    """Inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _legend(figure: Figure, plan: Design) -> None:
    lines = [
        Line2D([], [], color=colour, linestyle=style, linewidth=2.2, label=name)
        for name, (colour, style) in plan.colours.items()
    ]
    columns = min(len(lines), 6)
    figure.legend(handles=lines, loc="outside upper left", ncols=columns, frameon=False)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # No date or version: equal runs make equal files.
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    return buffer.getvalue()


def _has_positive(arms: Sequence[ArmSummary], metrics: Sequence[str]) -> bool:
    return any(
        value > 0
        for arm in arms
        for summary in arm.runs
        for metric in metrics
        for value in summary.run.series(metric).values()
    )


def _panel(arm: ArmSummary, axes: Sequence[str]) -> str:
    title = ", ".join(f"{axis} {arm.labels.get(axis, '-')}" for axis in axes)
    return f"{title} (emulated FP8)".strip() if is_emulated_arm(arm) else title


def _join(arm: ArmSummary, axes: Sequence[str]) -> str:
    settings = [arm.labels.get(axis, "-") for axis in axes]
    return " ".join(setting for setting in settings if setting != "-")


def _rank(found: RunSet, arm: ArmSummary, axis: str) -> int:
    """Place of the arm's setting among those of the axis; arms without one come last."""
    settings = found.settings[axis]
    setting = arm.labels.get(axis)
    return settings.index(setting) if setting in settings else len(settings)
