"""A published version as a model directory, which a server can be updated or started from."""

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_p3o.architecture import ModelArchitecture
from megatron_p3o.weights.families import ParamRow, param_rows
from megatron_p3o.weights.publish.served import ServedFormat
from megatron_p3o.weights.resharding.files import sync_directory
from megatron_p3o.weights.resharding.hf_sink import HfSink
from megatron_p3o.weights.resharding.values import RowValue

_MAX_SHARD_BYTES = 5_000_000_000
# Megatron's choice for the rows that keep their dtype: biases of the router.
_KEPT_DTYPE = torch.float32


def write_version(
    destination: Path,
    named_tensors: Iterable[tuple[str, Tensor]],
    architecture: ModelArchitecture,
    served: ServedFormat,
    *,
    config: Mapping[str, Any],
    files: Path,
    held: torch.dtype,
) -> None:
    """Write the model as `p3o reshard --to hf` would, all of it or nothing.

    The stream is consumed one table row at a time; one row's tensors exist beside the model. The
    directory appears when it is complete and synced.

    Args:
        destination: must not exist.
        named_tensors: the trainer's tensors by Hugging Face name, rows in the table's order.
        architecture: of the model.
        served: the numbers to write.
        config: the model's config.json.
        files: the model directory whose tokenizer and generation files are carried over.
        held: dtype of the trainer's parameters; the files are planned before the first one comes.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    rows = param_rows(architecture)
    dtypes = {
        row.megatron: served.row_dtype(row, _KEPT_DTYPE if row.keep_dtype else held) for row in rows
    }
    sink = HfSink(dtypes, rows, config, files, max_shard_bytes=_MAX_SHARD_BYTES)
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        # mkdtemp makes directories that only their owner can read.
        partial.chmod(0o755)
        try:
            sink.open(partial)
            for row, tensors in _by_row(named_tensors, rows):
                value = RowValue(row, parts=tensors)
                sink.write(row, value.converted(dtypes[row.megatron]))
            sink.finish()
        finally:
            sink.close()
        sync_directory(partial)
        partial.rename(destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _by_row(
    named_tensors: Iterable[tuple[str, Tensor]], rows: tuple[ParamRow, ...]
) -> Iterator[tuple[ParamRow, list[Tensor]]]:
    """The stream cut into the rows' tensors, on the CPU."""
    stream = iter(named_tensors)
    for row in rows:
        tensors = []
        for expected in row.hf:
            name, tensor = next(stream, (None, torch.empty(0)))
            assert name == expected, (name, expected)
            tensors.append(tensor.detach().cpu())
        yield row, tensors
