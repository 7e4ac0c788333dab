"""What a source and a sink of weights are: any format is one of each, and they meet row by row."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_p3o.architecture import ModelArchitecture
from megatron_p3o.weights.families import ParamRow
from megatron_p3o.weights.layouts import Vocab
from megatron_p3o.weights.resharding.values import RowValue

# Rows of a vocabulary travel in slices of about this size.
SLICE_BYTES = 32 * 1024 * 1024


class Source(Protocol):
    """A checkpoint that is read. Opening it checks that it is complete: names, shapes, files."""

    @property
    def format(self) -> str:
        """hf, torch_dist or torch."""
        ...

    @property
    def layout(self) -> str:
        """For people: what was found, such as "tp 2, pp 2"."""
        ...

    @property
    def architecture(self) -> ModelArchitecture: ...

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's config.json."""
        ...

    @property
    def files(self) -> Path | None:
        """Directory of tokenizer and generation files."""
        ...

    @property
    def iteration(self) -> int | None: ...

    @property
    def rows(self) -> tuple[ParamRow, ...]: ...

    @property
    def notes(self) -> list[str]:
        """What a user should know about what is left behind."""
        ...

    def dtype(self, row: ParamRow) -> torch.dtype:
        """As stored; float8_e4m3fn for FP8 blocks."""
        ...

    def read(self, row: ParamRow) -> RowValue:
        """The whole row. May be called from several threads."""
        ...

    def read_rows(self, row: ParamRow, start: int, stop: int) -> Tensor:
        """Rows of the only tensor of a row that `is_sliceable`."""
        ...

    def describe(self) -> list[tuple[str, str, tuple[int, ...], torch.dtype]]:
        """(table row, stored name, stored shape, dtype) of every tensor, for people."""
        ...


class Sink(Protocol):
    """A checkpoint that is written into a directory that nobody else sees yet."""

    @property
    def nbytes(self) -> int:
        """What all files together will take."""
        ...

    def open(self, directory: Path) -> None:
        """Create the files at their full size."""
        ...

    def write(self, row: ParamRow, value: RowValue) -> None:
        """A whole row, in the dtype it was planned with. May be called from several threads."""
        ...

    def write_rows(self, row: ParamRow, tensor: Tensor, start: int) -> None:
        """The next rows of a row that `is_sliceable`, in order."""
        ...

    def finish(self) -> None:
        """Write what is left and make everything durable."""
        ...

    def close(self) -> None:
        """Release the files, finished or not."""
        ...


def is_sliceable(row: ParamRow, dtype: torch.dtype) -> bool:
    """Whether the row may travel in slices: the vocabulary's, which may be the largest by far."""
    return isinstance(row.layout, Vocab) and dtype is not torch.float8_e4m3fn


def slices(row: ParamRow, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Ranges of rows of a row that `is_sliceable`."""
    ((num_rows, *rest),) = row.hf.values()
    row_bytes = max(1, torch.Size(rest).numel() * dtype.itemsize)
    step = max(1, SLICE_BYTES // row_bytes)
    return [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
