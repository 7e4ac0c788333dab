"""`p3o watch` and `p3o samples`: their words."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from megatron_p3o.errors import UserError
from megatron_p3o.inspect_run.samples import Order, choose, read_step
from megatron_p3o.inspect_run.watch import watch_run
from megatron_p3o.run_dir import RunDir

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="The run.dir of a run.")]


def watch(
    run: _Run,
    once: Annotated[
        bool, typer.Option("--once", help="Print one picture; so do pipes and files.")
    ] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between pictures.")] = 2.0,
) -> None:
    """Follow a run in the terminal until it has finished. Ctrl-C leaves the run alone."""
    watch_run(run, Console(highlight=False), once=once, every=every)


def samples(
    run: _Run,
    step: Annotated[
        int | None, typer.Option(min=0, help="As in samples.jsonl, from 0; the last if left out.")
    ] = None,
    worst: Annotated[bool, typer.Option("--worst", help="Least rewards first.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Greatest rewards first.")] = False,
    flagged: Annotated[
        bool,
        typer.Option(
            "--flagged", help="Only failed rewards, truncated responses, extreme log-probs."
        ),
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 5,
) -> None:
    """Show samples of a step: prompt, response, reward, and how likely its tokens were."""
    if worst and best:
        raise UserError("--worst and --best are two orders; give one of them")
    # Other commands need no tokenizer.
    from megatron_p3o.inspect_run.pieces import read_tokenizer
    from megatron_p3o.inspect_run.show import header, show

    order = Order.WORST if worst else Order.BEST if best else Order.RECORDED
    paths = RunDir(run)
    found = read_step(paths.samples, step)
    chosen = choose(found, order, only_flagged=flagged, limit=limit)
    tokenizer = read_tokenizer(paths.config)
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        header(found[0].step, len(chosen), len(found), has_tokenizer=tokenizer is not None)
    )
    for sample in chosen:
        console.print(Text("\n"), show(sample, tokenizer), sep="")
