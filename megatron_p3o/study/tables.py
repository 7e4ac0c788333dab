"""A report's tables: exact numbers for CSV files, readable ones for pages."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_p3o.study.analyze import (
    COMPARED,
    QUANTITIES,
    ArmSummary,
    Difference,
    RunSummary,
    meaning,
)
from megatron_p3o.study.runs import is_emulated
from megatron_p3o.study.statistics import Estimate

# Readable tables: title of the column -> quantity.
_LEARNING = {
    "first reward": "reward_first",
    "final reward": "reward_final",
    "best reward": "reward_best",
    "final / best": "final_over_best",
}
_TRUST = {
    "ESS, last": "ess_final",
    "least ESS": "ess_min",
    "mismatch k3": "mismatch_k3",
    "|log-prob gap|": "mismatch_abs_logprob",
    "ratio p99, last": "ratio_p99",
    "greatest ratio": "ratio_max",
    "greatest grad norm": "grad_norm_max",
    "entropy, last": "entropy_final",
    "length, last": "length_final",
}
_OF_A_RUN = {
    "final reward": "reward_final",
    "best reward": "reward_best",
    "least ESS": "ess_min",
    "mismatch k3": "mismatch_k3",
    "greatest ratio": "ratio_max",
    "greatest grad norm": "grad_norm_max",
}


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under columns.

    Example:
        Table("Runs", ("run", "reward"), (("p3o/seed0", "0.812"),))
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    """What the table says, in a sentence or two."""

    def to_csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(self.rows)
        return text.getvalue()

    def to_markdown(self) -> str:
        lines = [self.columns, tuple("---" for _ in self.columns), *self.rows]
        body = "\n".join("| " + " | ".join(map(_markdown_cell, line)) + " |" for line in lines)
        note = f"{self.note}\n\n" if self.note else ""
        return f"## {self.title}\n\n{note}{body}\n"


def arms_csv(arms: Sequence[ArmSummary]) -> Table:
    """summary.csv: one row an arm; `_mean`, `_ci95` (half width) and `_n` of every quantity."""
    axes = _axes(arms)
    statistics = ("mean", "ci95", "n")
    columns = (
        *("arm", *axes, "emulated_fp8", "runs", "complete", "over", "collapsed", "collapse_steps"),
        *(f"{quantity.name}_{part}" for quantity in QUANTITIES for part in statistics),
    )
    rows = []
    for arm in arms:
        row = [arm.name, *(arm.labels.get(axis, "") for axis in axes)]
        row += [str(is_emulated_arm(arm)).lower()]
        row += [str(len(arm.runs) + arm.num_missing), str(arm.num_complete), str(arm.num_over)]
        row += [str(len(arm.collapse_steps)), " ".join(map(str, arm.collapse_steps))]
        for quantity in QUANTITIES:
            row += _estimate_cells(arm.values[quantity.name])
        rows.append(tuple(row))
    return Table("Arms", columns, tuple(rows))


def runs_csv(summaries: Sequence[RunSummary]) -> Table:
    """runs.csv: one row a run."""
    axes = tuple(dict.fromkeys(axis for summary in summaries for axis in summary.run.labels))
    fixed = ("state", "steps", "planned_steps", "collapsed_at", "emulated_fp8")
    columns = ("run", "arm", *axes, "seed", *fixed, *(each.name for each in QUANTITIES))
    rows = []
    for summary in summaries:
        run = summary.run
        row = [run.name, run.arm, *(run.labels.get(axis, "") for axis in axes)]
        row += [_exact(run.seed), summary.state, str(run.num_steps), _exact(run.planned_steps)]
        row += [_exact(summary.collapsed_at), str(is_emulated(run)).lower()]
        row += [_exact(summary.values[each.name]) for each in QUANTITIES]
        rows.append(tuple(row))
    return Table("Runs", columns, tuple(rows))


def differences_csv(differences: Sequence[Difference]) -> Table:
    """differences.csv: one row an arm and quantity."""
    columns = ("axis", "arm", "baseline_arm", "quantity", "difference", "ci95", "n")
    rows = tuple(
        (
            *(each.axis, each.arm, each.baseline_arm, each.quantity),
            *_estimate_cells(each.difference),
        )
        for each in differences
    )
    return Table("Differences", columns, rows)


def learning_table(arms: Sequence[ArmSummary]) -> Table:
    """What the arms learned, and which collapsed."""
    rows = tuple(
        (
            arm_title(arm),
            _complete(arm),
            *(_readable(arm.values[name]) for name in _LEARNING.values()),
            _collapsed(arm),
        )
        for arm in arms
    )
    note = (
        "Means over complete runs, with the 95 % interval of the mean (Student's t) from two runs "
        "on. A run that stopped at a NaN has no final value but counts as collapsed."
    )
    return Table("Reward", ("arm", "complete", *_LEARNING, "collapsed"), rows, note)


def trust_table(arms: Sequence[ArmSummary]) -> Table:
    """How far the arms' policies were from what they learned from."""
    rows = tuple(
        (
            arm_title(arm),
            _complete(arm),
            *(_readable(arm.values[name], interval=False) for name in _TRUST.values()),
        )
        for arm in arms
    )
    note = "Means over complete runs. " + "; ".join(
        f"{column}: {meaning(name)}" for column, name in _TRUST.items()
    )
    return Table("Trust and stability", ("arm", "complete", *_TRUST), rows, note + ".")


def run_table(summaries: Sequence[RunSummary]) -> Table:
    """Every run, marked where it is not complete."""
    rows = tuple(
        (
            summary.run.name,
            _state(summary),
            _steps(summary),
            "-" if summary.collapsed_at is None else str(summary.collapsed_at),
            *(_number(summary.values[name]) for name in _OF_A_RUN.values()),
        )
        for summary in summaries
    )
    note = "Values of runs that are not complete are over the steps that they have."
    columns = ("run", "state", "steps", "collapsed at", *_OF_A_RUN)
    return Table("Runs", columns, rows, note)


def difference_table(axis: str, baseline: str, differences: Sequence[Difference]) -> Table:
    """One axis's settings minus its baseline."""
    arms = dict.fromkeys((each.arm, each.baseline_arm) for each in differences)
    by_arm: Mapping[tuple[str, str], Estimate] = {
        (each.arm, each.quantity): each.difference for each in differences
    }
    rows = []
    for arm, other in arms:
        cells = [by_arm.get((arm, name)) for name in COMPARED]
        pairs = max((cell.count for cell in cells if cell is not None), default=0)
        rows.append((arm, other, str(pairs), *(_readable(cell, signed=True) for cell in cells)))
    note = (
        f"Each arm minus the same arm with {axis} at {baseline}, seed by seed, with the 95 % "
        "interval of the mean difference. What both arms share, such as staleness, cancels. "
    ) + "; ".join(f"{name}: {meaning(name)}" for name in COMPARED)
    columns = ("arm", "baseline", "pairs", *COMPARED)
    return Table(f"Differences to {axis} = {baseline}", columns, tuple(rows), note + ".")


def unfinished_table(summaries: Sequence[RunSummary], missing: Sequence[str]) -> Table:
    """Runs that are not complete, with why where that is known."""
    rows = [
        (
            summary.run.name,
            _state(summary),
            _steps(summary),
            summary.run.attempt.message if summary.run.attempt is not None else "",
        )
        for summary in summaries
        if not summary.run.is_complete
    ]
    rows += [(name, "not started", "0", "") for name in missing]
    return Table("Runs that are not complete", ("run", "state", "steps", "message"), tuple(rows))


def write_csv(table: Table, path: Path) -> Path:
    path.write_text(table.to_csv(), encoding="utf-8")
    return path


def arm_title(arm: ArmSummary) -> str:
    """The arm's name, marked where its FP8 was emulated."""
    return f"{arm.name} (emulated FP8)" if is_emulated_arm(arm) else arm.name


def is_emulated_arm(arm: ArmSummary) -> bool:
    """Whether FP8 was emulated in all of the arm's runs."""
    return all(is_emulated(summary.run) for summary in arm.runs)


def _axes(arms: Sequence[ArmSummary]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(axis for arm in arms for axis in arm.labels))


def _complete(arm: ArmSummary) -> str:
    return f"{arm.num_complete} of {len(arm.runs) + arm.num_missing}"


def _collapsed(arm: ArmSummary) -> str:
    steps = arm.collapse_steps
    where = f" (at {', '.join(map(str, steps))})" if steps else ""
    return f"{len(steps)} of {arm.num_over}{where}"


def _state(summary: RunSummary) -> str:
    return summary.state if summary.run.is_complete else summary.state.upper()


def _steps(summary: RunSummary) -> str:
    run = summary.run
    if run.is_complete:
        return str(run.num_steps)
    return f"{run.num_steps} of {'?' if run.planned_steps is None else run.planned_steps}"


def _exact(value: float | None) -> str:
    return "" if value is None else repr(value)


def _estimate_cells(value: Estimate | None) -> list[str]:
    if value is None:
        return ["", "", "0"]
    return [_exact(value.mean), _exact(value.half_width), str(value.count)]


def _readable(value: Estimate | None, *, interval: bool = True, signed: bool = False) -> str:
    if value is None:
        return "-"
    mean = _number(value.mean)
    if signed and value.mean > 0:
        mean = f"+{mean}"
    if not interval or value.half_width is None:
        return mean
    return f"{mean} ± {_number(value.half_width)}"


def _number(value: float | None) -> str:
    """Three decimals where they say something, else powers of ten."""
    if value is None:
        return "-"
    size = abs(value)
    if size >= 1e5 or 0 < size < 5e-3:
        return f"{value:.2e}"
    return f"{value:.1f}" if size >= 100 else f"{value:.3f}"


def _markdown_cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
