"""A published version as a model directory, which a server can be updated or started from."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from megatron_p3o.architecture import ModelArchitecture
from megatron_p3o.weights.families import ParamRow, param_rows
from megatron_p3o.weights.publish.served import FP8, ServedFormat
from megatron_p3o.weights.resharding.files import sync_directory
from megatron_p3o.weights.resharding.hf_sink import HfSink, adapted_config
from megatron_p3o.weights.resharding.hf_source import SCALE_SUFFIX
from megatron_p3o.weights.resharding.values import BlockQuantized, HfTensor, RowValue

_MAX_SHARD_BYTES = 5_000_000_000
# Megatron's choice for the rows that keep their dtype: biases of the router.
_KEPT_DTYPE = torch.float32


def served_config(
    architecture: ModelArchitecture,
    served: ServedFormat,
    config: Mapping[str, Any],
    held: torch.dtype,
) -> dict[str, Any]:
    """The config.json of the model as it is served; for the arguments see `VersionWriter`."""
    rows = param_rows(architecture)
    return adapted_config(config, rows, _dtypes(rows, served, held))


class VersionWriter:
    """Writes the files that `p3o reshard --to hf` would, all of them or nothing.

    Tensors come as they are served, in the table's order; those of one row are held. The directory
    appears when `commit` has synced it; without that, leaving the context removes what was written.

    Example:
        with VersionWriter(directory, architecture, served, ...) as writer:
            for name, tensor in served_tensors(...):
                writer.add(name, tensor)
            writer.commit()
    """

    def __init__(
        self,
        destination: Path,
        architecture: ModelArchitecture,
        served: ServedFormat,
        *,
        config: Mapping[str, Any],
        files: Path,
        held: torch.dtype,
    ) -> None:
        """
        Args:
            destination: must not exist.
            architecture: of the model.
            served: the numbers of the tensors to come.
            config: the model's config.json.
            files: the model directory whose tokenizer and generation files are carried over.
            held: dtype of the trainer's parameters; the files are planned before the first one
                comes.
        """
        rows = param_rows(architecture)
        dtypes = _dtypes(rows, served, held)
        self._destination = destination
        self._sink = HfSink(dtypes, rows, config, files, max_shard_bytes=_MAX_SHARD_BYTES)
        self._rows = iter(rows)
        self._row = next(self._rows)
        self._parts: list[HfTensor] = []
        self._unscaled: Tensor | None = None
        self._partial: Path | None = None

    def __enter__(self) -> Self:
        parent = self._destination.parent
        parent.mkdir(parents=True, exist_ok=True)
        self._partial = Path(tempfile.mkdtemp(prefix=f".{self._destination.name}.", dir=parent))
        # mkdtemp makes directories that only their owner can read.
        self._partial.chmod(0o755)
        self._sink.open(self._partial)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._sink.close()
        if self._partial is not None:
            shutil.rmtree(self._partial, ignore_errors=True)

    def add(self, name: str, tensor: Tensor) -> None:
        """The next tensor.

        Raises:
            OSError: it cannot be written.
        """
        tensor = tensor.cpu()
        if tensor.dtype is FP8:
            self._unscaled = tensor
            return
        part: HfTensor = tensor
        if self._unscaled is not None:
            assert name.endswith(SCALE_SUFFIX), name
            part, self._unscaled = BlockQuantized(self._unscaled, tensor), None
            name = name.removesuffix(SCALE_SUFFIX)
        expected = list(self._row.hf)[len(self._parts)]
        assert name == expected, (name, expected)
        self._parts.append(part)
        if len(self._parts) == len(self._row.hf):
            self._sink.write(self._row, RowValue(self._row, parts=self._parts))
            self._parts = []
            self._row = next(self._rows, self._row)

    def commit(self) -> None:
        """Make the directory appear under its name.

        Raises:
            OSError: it cannot be written.
        """
        assert self._partial is not None
        self._sink.finish()
        sync_directory(self._partial)
        self._partial.rename(self._destination)
        self._partial = None


def _dtypes(
    rows: tuple[ParamRow, ...], served: ServedFormat, held: torch.dtype
) -> dict[str, torch.dtype]:
    return {
        row.megatron: served.row_dtype(row, _KEPT_DTYPE if row.keep_dtype else held) for row in rows
    }
