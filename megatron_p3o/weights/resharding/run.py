"""From a source to a sink, row by row.

    open source -> plan sink -> check disk space -> temporary directory beside the destination
      -> workers: read a row -> count NaN -> convert -> write its bytes to their places
      -> finish, sync -> [read back and compare] -> rename

Workers hold one row each, and large rows wait until the memory they need is free. A row of the
vocabulary travels in slices.
"""

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_p3o.errors import ConfigurationError, InputError
from megatron_p3o.weights.families import ParamRow
from megatron_p3o.weights.resharding.detect import open_source
from megatron_p3o.weights.resharding.dist_sink import DistSink
from megatron_p3o.weights.resharding.dist_source import DistSource
from megatron_p3o.weights.resharding.endpoints import Sink, Source, is_sliceable, slices
from megatron_p3o.weights.resharding.files import sync_directory
from megatron_p3o.weights.resharding.hf_sink import HfSink
from megatron_p3o.weights.resharding.model_config import arguments_from_config
from megatron_p3o.weights.resharding.options import ReshardOptions
from megatron_p3o.weights.resharding.target import global_shape
from megatron_p3o.weights.resharding.torch_sink import TorchSink
from megatron_p3o.weights.resharding.values import RowValue, count_nonfinite, same_bits

# Bytes of rows in flight; each row needs about three times its size while it is converted.
_MEMORY_BUDGET = 768 * 1024 * 1024
_COPIES_IN_FLIGHT = 3
_NAMED_TENSORS = 3

Progress = Callable[[str, int, int], None]
"""Called with (what is done, bytes done, bytes in all)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReshardReport:
    """What was done."""

    num_tensors: int
    nbytes: int
    """Written."""
    num_nonfinite: int
    notes: tuple[str, ...]


def reshard(
    source: str | Path,
    destination: str | Path,
    options: ReshardOptions,
    progress: Progress = lambda what, done, total: None,
) -> ReshardReport:
    """Write the weights of one checkpoint as another one, all of it or nothing.

    Args:
        source: see `open_source`; it is only read.
        destination: must not exist; it appears when it is complete.
        options: the format and layout to write.
        progress: told about every row.

    Raises:
        UserError: a bad source, destination or option; there is no destination.
    """
    source, destination = Path(source), Path(destination)
    options.check()
    _check_destination(source, destination)
    reader = open_source(source, config_dir=options.config_dir, unsafe_pickle=options.unsafe_pickle)
    dtypes = {row.megatron: target_dtype(reader, row, options) for row in reader.rows}
    if options.optimizer and not (isinstance(reader, DistSource) and options.to == "torch_dist"):
        raise ConfigurationError(
            f"--optimizer with SRC as {reader.format} and --to={options.to} is not supported: only "
            "torch_dist says what an optimizer's state belongs to; leave it out"
        )
    sink = _make_sink(reader, dtypes, options)
    destination.parent.mkdir(parents=True, exist_ok=True)
    _check_space(destination.parent, sink.nbytes)
    partial = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        # mkdtemp makes directories that only their owner can read.
        partial.chmod(0o755)
        transfer = _Transfer(reader, sink, dtypes, options, progress)
        try:
            sink.open(partial)
            transfer.run()
            transfer.check_finite(source)
            sink.finish()
        finally:
            sink.close()
        if options.verify:
            _verify(reader, partial, dtypes, options, progress)
        sync_directory(partial)
        partial.rename(destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return ReshardReport(
        num_tensors=sum(len(row.hf) for row in reader.rows),
        nbytes=sink.nbytes,
        num_nonfinite=sum(transfer.nonfinite.values()),
        notes=tuple(dict.fromkeys(reader.notes)),
    )


def target_dtype(source: Source, row: ParamRow, options: ReshardOptions) -> torch.dtype:
    """The dtype in which a row is written; float8_e4m3fn means FP8 blocks."""
    stored = source.dtype(row)
    fp8 = torch.float8_e4m3fn
    if row.keep_dtype:
        return stored
    if options.dtype == "bf16":
        return torch.bfloat16
    if options.dtype == "fp32":
        return torch.float32
    if options.dtype == "fp8-block" and row.fp8:
        return fp8
    if stored is fp8 and options.to != "hf":
        # Megatron trains in the high precision that the model was published in.
        named = getattr(torch, source.architecture.torch_dtype, None)
        return named if isinstance(named, torch.dtype) and named is not fp8 else torch.bfloat16
    return stored


class _Transfer:
    """All rows from a source into a sink."""

    def __init__(
        self,
        source: Source,
        sink: Sink,
        dtypes: dict[str, torch.dtype],
        options: ReshardOptions,
        progress: Progress,
    ) -> None:
        self.nonfinite: dict[str, int] = {}
        self._source = source
        self._sink = sink
        self._dtypes = dtypes
        self._options = options
        self._steps = _Steps("write", source, progress)

    def run(self) -> None:
        _for_each_row(self._source, self._copy, self._options.workers)

    def check_finite(self, path: Path) -> None:
        if not self.nonfinite or self._options.allow_nonfinite:
            return
        total = sum(self.nonfinite.values())
        named = [f"{name} ({count})" for name, count in self.nonfinite.items()][:_NAMED_TENSORS]
        more = len(self.nonfinite) - len(named)
        raise InputError(
            f"SRC={str(path)!r} holds {total} NaN or infinite numbers, in {', '.join(named)}"
            + (f" and {more} more tensors" if more else "")
            + "; use a sound checkpoint, or add --allow-nonfinite to copy them as they are"
        )

    def _copy(self, row: ParamRow) -> None:
        dtype, stored = self._dtypes[row.megatron], self._source.dtype(row)
        if not (is_sliceable(row, dtype) and is_sliceable(row, stored)):
            value = self._source.read(row)
            if self._may_write(row, value.num_nonfinite()):
                self._sink.write(row, value.converted(dtype))
            self._steps.advance(value.nbytes)
            return
        for start, stop in slices(row, stored):
            rows = self._source.read_rows(row, start, stop)
            self._may_write(row, count_nonfinite(rows))
            self._sink.write_rows(row, rows.to(dtype), start)
            self._steps.advance(rows.nbytes)

    def _may_write(self, row: ParamRow, num_nonfinite: int) -> bool:
        if not num_nonfinite:
            return True
        self.nonfinite[row.megatron] = self.nonfinite.get(row.megatron, 0) + num_nonfinite
        is_kept = self._source.dtype(row) is torch.float8_e4m3fn
        if self._dtypes[row.megatron] is torch.float8_e4m3fn and not is_kept:
            if self._options.allow_nonfinite:
                raise InputError(
                    f"{row.megatron} holds {num_nonfinite} NaN or infinite numbers, which FP8 "
                    "blocks cannot express; use another --dtype"
                )
            return False
        return True


class _Steps:
    """Bytes done, from several threads."""

    def __init__(self, what: str, source: Source, progress: Progress) -> None:
        self._what = what
        self._progress = progress
        self._total = sum(_row_bytes(source, row) for row in source.rows)
        self._done = 0
        self._lock = threading.Lock()
        progress(what, 0, self._total)

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            self._progress(self._what, min(self._done, self._total), self._total)


class _Budget:
    """Bytes that rows in flight may take; a row above the limit waits until it is alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._changed = threading.Condition()

    @contextmanager
    def reserve(self, nbytes: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + nbytes <= self._limit)
            self._used += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._used -= nbytes
                self._changed.notify_all()


def _for_each_row(source: Source, function: Callable[[ParamRow], None], workers: int) -> None:
    """Call `function` for every row, on several threads; the first error stops the others."""
    budget = _Budget(_MEMORY_BUDGET)
    stopped = threading.Event()

    def guarded(row: ParamRow) -> None:
        if stopped.is_set():
            return
        sliced = is_sliceable(row, source.dtype(row))
        nbytes = 0 if sliced else _row_bytes(source, row) * _COPIES_IN_FLIGHT
        with budget.reserve(nbytes):
            function(row)

    with ThreadPoolExecutor(workers) as pool:
        try:
            futures = [pool.submit(guarded, row) for row in source.rows]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            # After an error or Ctrl-C only the rows in hand are finished.
            stopped.set()


def _verify(
    source: Source,
    directory: Path,
    dtypes: dict[str, torch.dtype],
    options: ReshardOptions,
    progress: Progress,
) -> None:
    """Read back what was written and compare it with the source, bit by bit."""
    written = open_source(directory, unsafe_pickle=options.unsafe_pickle)
    by_name = {row.megatron: row for row in written.rows}
    assert by_name.keys() == dtypes.keys()
    steps = _Steps("verify", source, progress)

    def compare(row: ParamRow) -> None:
        dtype, stored = dtypes[row.megatron], source.dtype(row)
        other = by_name[row.megatron]
        if is_sliceable(row, dtype) and is_sliceable(row, stored):
            same = True
            for start, stop in slices(row, stored):
                rows = source.read_rows(row, start, stop)
                same = same and same_bits(rows.to(dtype), written.read_rows(other, start, stop))
                steps.advance(rows.nbytes)
        else:
            value: RowValue = source.read(row)
            same = value.converted(dtype).equals(written.read(other))
            steps.advance(value.nbytes)
        if not same:
            raise InputError(
                f"{row.megatron} was read back different from what was written; check the disk and "
                "run again"
            )

    _for_each_row(source, compare, options.workers)


def _make_sink(source: Source, dtypes: dict[str, torch.dtype], options: ReshardOptions) -> Sink:
    if options.to == "hf":
        return HfSink(
            dtypes,
            source.rows,
            source.config,
            source.files,
            max_shard_bytes=options.max_shard_bytes,
        )
    layout = options.layout.resolved(source.architecture)
    layout.check_rows(source.rows)
    if options.to == "torch_dist":
        return DistSink(
            dtypes,
            source.rows,
            layout,
            config=source.config,
            files=source.files,
            iteration=source.iteration,
            optimizer=source if isinstance(source, DistSource) and options.optimizer else None,
        )
    if options.names == "local" and source.architecture.mla is not None and layout.tensor > 1:
        raise ConfigurationError(
            f"--names=local with --tp={layout.tensor} is not supported for latent attention, whose "
            "down-projections Megatron's local layers cut and Transformer Engine's do not; use "
            "--names te"
        )
    arguments = arguments_from_config(source.config, source.architecture, layout)
    return TorchSink(
        dtypes,
        source.rows,
        layout,
        config=source.config,
        files=source.files,
        arguments=arguments,
        iteration=source.iteration,
        transformer_engine=options.names == "te",
    )


def _check_destination(source: Path, destination: Path) -> None:
    if destination.exists() or destination.is_symlink():
        raise InputError(
            f"DST={str(destination)!r} already exists; choose another directory, or remove it"
        )
    if source.resolve() in destination.resolve().parents:
        raise InputError(
            f"DST={str(destination)!r} lies in SRC={str(source)!r}, which is only read; choose a "
            "directory beside it"
        )


def _check_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise InputError(
            f"DST needs {needed} bytes and the disk of {str(directory)!r} has {free} free; free "
            f"{needed - free} bytes, or choose another disk"
        )


def _row_bytes(source: Source, row: ParamRow) -> int:
    return torch.Size(global_shape(row)).numel() * source.dtype(row).itemsize
