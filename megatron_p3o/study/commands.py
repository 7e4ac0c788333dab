"""`p3o study`: its words, and what a person sees while a study runs."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_p3o.study.arms import PlannedRun, load_plan
from megatron_p3o.study.runner import (
    Action,
    Outcome,
    check_plan,
    run_all,
    select,
    write_plan,
    write_run,
)

app = typer.Typer(
    no_args_is_help=True, help="Run many configurations and seeds, and compare what they gave."
)

_INTERRUPTED = 130  # as a shell has it for Ctrl-C


@app.command()
def run(
    study: Annotated[str, typer.Argument(metavar="STUDY.yaml", help="What to run.")],
    jobs: Annotated[int, typer.Option(min=1, help="Runs at once; they share the cores.")] = 1,
    only: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Arms, or arm/seed<k>; repeatable.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done; write nothing.")
    ] = False,
    only_write: Annotated[
        bool,
        typer.Option(
            "--write", help="Write each RUN.yaml and print it with its run dir; start nothing."
        ),
    ] = False,
) -> None:
    """Run a study's arms, or go on with them: finished runs are skipped, others resumed."""
    plan = load_plan(study)
    runs = select(plan, only or [])
    actions = check_plan(plan)
    console = Console(highlight=False, soft_wrap=True)
    if dry_run:
        for each in runs:
            console.print(Text(f"{actions[each.name].value:<14}  {each.name}"))
        return
    write_plan(plan)
    if only_write:
        for each in runs:
            # Plain words, for a scheduler's script to read.
            print(write_run(each), each.run_dir.root)
        return
    lines = _Lines(console, len(runs))
    try:
        outcomes = run_all(plan, runs, jobs=jobs, on_start=lines.start, on_end=lines.end)
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print(Text(f"\nstopped; all runs were ended. To go on: p3o study run {study}"))
        raise typer.Exit(_INTERRUPTED) from None
    console.print(_table(outcomes))
    console.print(Text(f"report: p3o study report {plan.study.study.dir}"))
    if any(outcome.exit_code for outcome in outcomes):
        raise typer.Exit(1)


@app.command()
def report(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A study dir, or any directory of run dirs.")
    ],
    out: Annotated[Path | None, typer.Option(help="Where to write, if not DIR/report.")] = None,
) -> None:
    """Write tables, figures and report.html from run dirs, finished or not."""
    # Here: matplotlib takes a second, and only this command draws.
    from megatron_p3o.study.report import write_report

    written = write_report(directory, out or directory / "report")
    for path in written:
        print(path)


class _Lines:
    """One line when a run starts and one when it ends."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total, self._done = console, total, 0

    def start(self, run: PlannedRun, action: Action) -> None:
        self._console.print(Text(f"{run.name}  {action.value}", style="dim"))

    def end(self, outcome: Outcome) -> None:
        self._done += 1
        width = len(str(self._total))
        line = Text(f"{self._done:>{width}}/{self._total}  {outcome.run.name}  ")
        if outcome.action is Action.SKIP:
            line.append("finished before  ")
        else:
            line.append(f"{outcome.seconds:.0f} s  ")
        if outcome.exit_code:
            line.append(f"failed: {outcome.message}", style="red")
        else:
            line.append(f"final reward {_number(outcome.final_reward)}")
        self._console.print(line)


def _table(outcomes: Sequence[Outcome]) -> Table:
    counts = Counter("failed" if outcome.exit_code else "done" for outcome in outcomes)
    title = f"{len(outcomes)} runs: {counts['done']} done, {counts['failed']} failed"
    table = Table(title=title, title_justify="left")
    for column in ("arm", "seed", "seconds", "final reward", ""):
        right = column in ("seed", "seconds", "final reward")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for outcome in outcomes:
        table.add_row(
            Text(outcome.run.arm.name),
            str(outcome.run.seed),
            f"{outcome.seconds:.0f}",
            _number(outcome.final_reward),
            Text(outcome.message, style="red"),
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
