"""What a person sees while a run trains: a progress bar or lines, alarms, a table at the end."""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from megatron_p3o.config import RunConfig
from megatron_p3o.run_dir import RunDir
from megatron_p3o.trainer.timing import PHASES


class Display(Protocol):
    """Shows steps as they finish."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class SilentDisplay:
    """For ranks other than 0."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class _LogLines(logging.Handler):
    """Prints log records among the steps, above the progress bar where there is one."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), flush=True)


@contextmanager
def log_lines() -> Iterator[None]:
    """Show this package's log, from INFO on."""
    logger, handler = logging.getLogger("megatron_p3o"), _LogLines()
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class ConsoleDisplay:
    """One line a step, under a progress bar where the output is a terminal."""

    def __init__(self, config: RunConfig, *, first_step: int) -> None:
        self._config = config
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task(
            config.objective.name, total=config.train.steps, completed=first_step
        )
        self._progress.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._console.print(_step_line(step, metrics, self._config.train.steps))
        found = alarms(metrics, self._config)
        if found:
            self._console.print(Text(f"step {step}: alarm: {'; '.join(found)}", style="yellow"))
        self._progress.advance(self._task)

    def close(self) -> None:
        self._progress.stop()


def alarms(metrics: Mapping[str, float], config: RunConfig) -> list[str]:
    """Readable warnings: the mean ratio or the ESS left its configured band.

    They make the step's alarm line on the display, and `alarm` in its line of metrics.jsonl.
    """
    found = []
    low, high = config.ess.mean_ratio_band
    if not low <= metrics["ratio/mean"] <= high:
        found.append(
            f"mean ratio {metrics['ratio/mean']:.3f} outside ess.mean_ratio_band [{low}, {high}]; "
            "ESS does not see a uniform scale: compare trainer and rollout log-probs"
        )
    if metrics["ess/step"] < config.ess.min_ess:
        found.append(
            f"ESS {metrics['ess/step']:.3f} below ess.min_ess {config.ess.min_ess}; the batch is "
            "far off-policy"
        )
    return found


def print_summary(records: Sequence[Mapping[str, float]], run_dir: RunDir) -> None:
    """First, last and extreme values of a finished run, and where its files are."""
    console = Console(file=sys.stdout, highlight=False)
    edge = min(3, len(records))
    table = Table(title=f"{len(records)} steps", title_justify="left")
    for column, justify in (("metric", "left"), ("first 3", "right"), ("last 3", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    table.add_column("min", justify="right")
    table.add_column("max", justify="right")
    for name in (
        "reward/mean",
        "ess/step",
        "ratio/mean",
        "entropy/mean",
        "grad_norm",
        "time/step_s",
    ):
        values = [record[name] for record in records]
        table.add_row(
            name,
            f"{sum(values[:edge]) / edge:.3f}",
            f"{sum(values[-edge:]) / edge:.3f}",
            f"{min(values):.3f}",
            f"{max(values):.3f}",
        )
    console.print(table)
    console.print(f"run dir  {run_dir.root}")
    console.print(f"curves   {run_dir.curves}")


def _step_line(step: int, metrics: Mapping[str, float], steps: int) -> str:
    seconds = {name: metrics[f"time/{name}_s"] for name in PHASES}
    if seconds["checkpoint"] < 0.05:  # most steps save nothing
        del seconds["checkpoint"]
    evaluated = ""
    if "time/eval_s" in metrics:
        seconds["eval"] = metrics["time/eval_s"]
        name = next(name for name in metrics if name.startswith("eval/pass_at_"))
        evaluated = f"  {name} {metrics[name]:.3f}"
    split = " ".join(f"{name} {value:.1f}" for name, value in seconds.items())
    return (
        f"step {step + 1:>{len(str(steps))}}/{steps}  reward {metrics['reward/mean']:.3f}  "
        f"ess {metrics['ess/step']:.4f}  ratio {metrics['ratio/mean']:.4f}  "
        f"grad {metrics['grad_norm']:.3f}  {metrics['time/step_s']:.1f}s ({split}){evaluated}"
    )
