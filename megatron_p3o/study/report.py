"""A study's report, from its run dirs alone.

<out>/report.html       figures and tables in one file, for reading
<out>/summary.md        the tables
<out>/summary.csv       one row an arm
<out>/runs.csv          one row a run
<out>/differences.csv   with report.baseline: each arm minus its baseline
<out>/figures/*.png     the figures
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_p3o.errors import InputError
from megatron_p3o.run_dir import replace_text
from megatron_p3o.study.analyze import (
    ArmSummary,
    Difference,
    RunSummary,
    compare,
    missing_metrics,
    summarize_arms,
    summarize_run,
)
from megatron_p3o.study.config import CollapseRule
from megatron_p3o.study.figures import Drawing, draw_all
from megatron_p3o.study.page import Page, to_html, to_markdown
from megatron_p3o.study.runs import RunSet, is_emulated, read_runs
from megatron_p3o.study.tables import (
    Table,
    arms_csv,
    difference_table,
    differences_csv,
    learning_table,
    run_table,
    runs_csv,
    trust_table,
    unfinished_table,
)


def write_report(directory: Path, out: Path) -> list[Path]:
    """Read the runs below a directory and write their report.

    Args:
        directory: a study dir, or any directory of run dirs.
        out: where to write; made if it is not there.

    Returns:
        The files written, the page first.

    Raises:
        InputError: there are no runs, a run cannot be read, or `out` cannot be written.
    """
    found = read_runs(directory)
    rule = found.study.collapse if found.study is not None else CollapseRule()
    baseline = (found.study.report.baseline if found.study is not None else None) or {}
    summaries = [summarize_run(run, rule) for run in found.runs]
    arms = summarize_arms(summaries, found.missing)
    differences = compare(arms, baseline)
    page = Page(
        title=f"Study {directory.resolve().name}",
        banners=_banners(found),
        introduction=[_counts(found, summaries, arms), collapse_text(rule)],
        tables=[
            learning_table(arms),
            trust_table(arms),
            *(
                difference_table(axis, setting, [d for d in differences if d.axis == axis])
                for axis, setting in baseline.items()
            ),
            *_unfinished(found, summaries),
            run_table(summaries),
        ],
        notes=_notes(found),
    )
    drawings = draw_all(found, arms, window=rule.window)
    texts = {
        "report.html": to_html(page, drawings),
        "summary.md": to_markdown(page),
        "summary.csv": arms_csv(arms).to_csv(),
        "runs.csv": runs_csv(summaries).to_csv(),
        **_differences_file(baseline, differences),
    }
    return _write(out, texts, drawings)


def collapse_text(rule: CollapseRule) -> str:
    """The rule in words."""
    window, left = rule.window, 1 - rule.drop
    return (
        f"Collapse: let m be the mean reward over {window} steps. A run has collapsed at the "
        f"first step from which on, to its end, every m is below {left:g} times the best m before "
        f"it, or where it stopped because of a NaN or infinity. A sudden drop is found up to "
        f"{window} steps late. First and last values are over {window} steps as well."
    )


def _differences_file(
    baseline: dict[str, str], differences: Sequence[Difference]
) -> dict[str, str]:
    return {"differences.csv": differences_csv(differences).to_csv()} if baseline else {}


def _write(out: Path, texts: dict[str, str], drawings: Sequence[Drawing]) -> list[Path]:
    figures = out / "figures"
    try:
        figures.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            replace_text(out / name, text)
        for drawing in drawings:
            (figures / f"{drawing.name}.png").write_bytes(drawing.png)
    except OSError as error:
        raise InputError(
            f"--out={str(out)!r} cannot be written ({error.strerror}); choose another directory"
        ) from error
    return [*(out / name for name in texts), *(figures / f"{d.name}.png" for d in drawings)]


def _banners(found: RunSet) -> list[str]:
    fp8 = [run for run in found.runs if is_emulated(run)]
    if not fp8:
        return []
    which = "all runs" if len(fp8) == len(found.runs) else f"{len(fp8)} of the runs"
    return [
        f"Emulated FP8: in {which} FP8 numerics were emulated; no FP8 hardware computed them. "
        "Speed and memory say nothing about FP8."
    ]


def _counts(found: RunSet, summaries: Sequence[RunSummary], arms: Sequence[ArmSummary]) -> str:
    states = Counter(summary.state for summary in summaries)
    states["not started"] = len(found.missing)
    shown = ", ".join(f"{count} {state}" for state, count in states.items() if count)
    return f"{len(arms)} arms, {len(summaries) + len(found.missing)} runs: {shown}."


def _unfinished(found: RunSet, summaries: Sequence[RunSummary]) -> list[Table]:
    table = unfinished_table(summaries, found.missing)
    return [table] if table.rows else []


def _notes(found: RunSet) -> list[str]:
    absent = [
        f"{metric} is not in {_listed(names)}: gaps in tables and figures"
        for metric, names in missing_metrics(found.runs).items()
    ]
    repeated = [
        f"arm {arm} has seed {seed} {count} times; differences use the first"
        for (arm, seed), count in Counter((run.arm, run.seed) for run in found.runs).items()
        if count > 1
    ]
    of_runs = [f"{run.name}: {note}" for run in found.runs for note in run.notes]
    return [*found.notes, *absent, *repeated, *of_runs]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
