"""`p3o reshard` as a person sees it: options as words, a progress bar in bytes, tables."""

import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from megatron_p3o.errors import ConfigurationError
from megatron_p3o.weights.layouts import Vocab
from megatron_p3o.weights.resharding.detect import open_source
from megatron_p3o.weights.resharding.endpoints import Source
from megatron_p3o.weights.resharding.files import num_bytes
from megatron_p3o.weights.resharding.options import ReshardOptions
from megatron_p3o.weights.resharding.run import reshard
from megatron_p3o.weights.resharding.target import TargetLayout, global_shape

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([KMGT]?)B?$", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of a size such as 5GB or 500MB, in powers of ten.

    Raises:
        ConfigurationError: it is not a size.
    """
    match = _SIZE.match(text.strip())
    if match is None:
        raise ConfigurationError(
            f"--max-shard-size={text} must be a number of bytes with an optional KB, MB, GB or TB; "
            "use 5GB"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_chunk_layers(text: str | None) -> tuple[int, ...] | None:
    """The numbers of a list such as 3,5,4,4.

    Raises:
        ConfigurationError: it is not a list of numbers.
    """
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ConfigurationError(
            f"--chunk-layers={text} must be numbers separated by commas; use 3,5,4,4"
        )
    return tuple(map(int, parts))


def convert(
    source: str,
    destination: str | None,
    *,
    to: str | None,
    sizes: Mapping[str, int],
    expert_tensor: int | None,
    chunk_layers: str | None,
    vocab_divisible_by: int,
    max_shard_size: str,
    config_dir: str | None,
    **options: Any,
) -> None:
    """Reshard as the words of the command line say.

    Raises:
        UserError: as `reshard`, and for words that are missing or no numbers.
    """
    if destination is None or to is None:
        raise ConfigurationError(
            f"DST={destination} and --to={to} must both be given; to look at SRC only, add "
            "--inspect"
        )
    layout = TargetLayout(
        **sizes,
        expert_tensor=expert_tensor,
        chunk_layers=parse_chunk_layers(chunk_layers),
        vocab_divisible_by=vocab_divisible_by,
    )
    chosen = ReshardOptions(
        to=to,
        layout=layout,
        max_shard_bytes=parse_size(max_shard_size),
        config_dir=None if config_dir is None else Path(config_dir),
        **options,
    )
    _show(Path(source), Path(destination), chosen)


def _show(source: Path, destination: Path, options: ReshardOptions) -> None:
    """Reshard, with a progress bar where the output is a terminal."""
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    bar = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    tasks: dict[str, TaskID] = {}

    def show(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bar.add_task(what, total=total)
        bar.update(tasks[what], completed=done)

    with bar:
        report = reshard(source, destination, options, show)
    for note in report.notes:
        console.print(f"note: {note}", markup=False)
    if report.num_nonfinite:
        console.print(f"note: {report.num_nonfinite} NaN or infinite numbers were copied")
    verified = ", read back and compared" if options.verify else ""
    console.print(
        f"{destination}: {report.num_tensors} tensors, {report.nbytes / 1e9:.3f} GB as "
        f"{options.to}{verified}",
        markup=False,
    )


def inspect(source: str, *, config_dir: str | None, unsafe_pickle: bool) -> None:
    """Print what a checkpoint holds."""
    opened = open_source(
        Path(source),
        config_dir=None if config_dir is None else Path(config_dir),
        unsafe_pickle=unsafe_pickle,
    )
    lines = [
        (name, "x".join(map(str, shape)) or "scalar", str(dtype).removeprefix("torch."), row)
        for row, name, shape, dtype in opened.describe()
    ]
    header = ("stored tensor", "shape", "dtype", "Megatron parameter")
    widths = [max(len(line[i]) for line in (header, *lines)) for i in range(3)]
    for line in (header, *lines):
        columns = [text.ljust(width) for text, width in zip(line, widths, strict=False)]
        print("  ".join([*columns, line[3]]))
    print()
    for title, value in _summary(opened):
        print(f"{title}: {value}")


def _summary(source: Source) -> list[tuple[str, str]]:
    architecture = source.architecture
    elements: Counter[str] = Counter()
    size = 0
    for row in source.rows:
        shape, dtype = global_shape(row), source.dtype(row)
        elements[str(dtype).removeprefix("torch.")] += num_bytes(shape, dtype) // dtype.itemsize
        size += num_bytes(shape, dtype)
    vocab = next(row for row in source.rows if isinstance(row.layout, Vocab))
    stored = [shape for row, _, shape, _ in source.describe() if row == vocab.megatron]
    # A stacked or sharded vocabulary has its rows first.
    padding = sum(shape[0] for shape in stored) - architecture.vocab_size
    embeddings = "tied" if architecture.tie_word_embeddings else "not tied"
    lines = [
        ("format", f"{source.format} ({source.layout})"),
        ("family", f"{architecture.family}, {architecture.num_layers} layers, {embeddings}"),
        ("vocabulary", f"{architecture.vocab_size} + {padding} rows of padding"),
        ("elements", ", ".join(f"{count} {dtype}" for dtype, count in elements.items())),
        ("size", f"{size / 1e9:.3f} GB without padding"),
    ]
    if source.iteration:
        lines.append(("iteration", str(source.iteration)))
    return lines + [("note", note) for note in source.notes]
