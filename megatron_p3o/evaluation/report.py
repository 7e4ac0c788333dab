"""Tables of evaluations and of comparisons."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_p3o.evaluation.compare import Comparison
from megatron_p3o.evaluation.resampling import NUM_FLIPS, NUM_RESAMPLES, Interval
from megatron_p3o.evaluation.summary import Figures

_PROMPT_WIDTH = 60


def print_figures(found: Figures, title: str, console: Console) -> None:
    """One line and a table."""
    console.print(Text(title), soft_wrap=True)
    table = _table(None, "figure", "value", "95 % interval")
    if found.reward_mean is not None:
        table.add_row("reward mean", *_cells(found.reward_mean))
    for k, interval in found.pass_at.items():
        table.add_row(f"pass@{k}", *_cells(interval))
    table.add_row("length mean", f"{found.length_mean:.1f}", "")
    quantiles = found.length_quantiles
    names, values = " ".join(quantiles), " ".join(f"{value:.0f}" for value in quantiles.values())
    table.add_row(f"length {names}", values, "")
    table.add_row("truncated", f"{found.truncated_fraction:.4f}", "")
    table.add_row("failed rewards", str(found.num_failed_rewards), "")
    console.print(table)


def print_comparison(found: Comparison, console: Console, *, num_changed: int) -> None:
    """Figures of both, wins and losses, and the prompts that changed most."""
    for note in found.notes:
        console.print(Text(f"note: {note}"))
    only_a, only_b = found.num_unpaired
    if only_a or only_b:
        console.print(Text(f"note: left out: {only_a} prompts only in A, {only_b} only in B"))
    if found.num_without_reward:
        console.print(Text(f"note: {found.num_without_reward} prompts lack a reward in A or B"))
    table = _table(
        f"{found.num_pairs} prompts, paired", "figure", "A", "B", "B - A", "95 % interval", "p"
    )
    for one in found.differences:
        difference, interval = _cells(one.interval, sign="+")
        table.add_row(
            one.name, f"{one.a:.4f}", f"{one.b:.4f}", difference, interval, f"{one.p_value:.4f}"
        )
    console.print(table)
    console.print(
        Text(
            f"B wins {found.num_wins}, loses {found.num_losses}, ties {found.num_ties} "
            f"(sign test p {found.sign_test_p_value:.4f})\n"
            f"intervals: paired bootstrap over prompts, {NUM_RESAMPLES} resamples; p: sign-flip "
            f"test over prompts, up to {NUM_FLIPS} patterns"
        )
    )
    if found.changed and num_changed:
        _print_changed(found, console, num_changed)


def _print_changed(found: Comparison, console: Console, num_changed: int) -> None:
    shown = found.changed[:num_changed]
    title = f"changed most: {len(shown)} of {len(found.changed)}"
    table = _table(title, "prompt_id", "A", "B", "B - A")
    table.add_column("prompt", overflow="fold")
    for pair in shown:
        table.add_row(
            Text(pair.item.prompt_id),
            f"{pair.a:.3f}",
            f"{pair.b:.3f}",
            f"{pair.change:+.3f}",
            Text(" ".join(pair.item.prompt.split())[:_PROMPT_WIDTH]),
        )
    console.print(table)


def _table(title: str | None, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    return table


def _cells(interval: Interval, sign: str = "") -> tuple[str, str]:
    value = f"{interval.value:{sign}.4f}"
    if interval.low is None or interval.high is None:
        return value, "-"
    return value, f"[{interval.low:{sign}.4f}, {interval.high:{sign}.4f}]"
