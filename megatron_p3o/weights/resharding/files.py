"""Tensors at known places of files: read on demand, written in any order. No memory maps.

A memory map would be shorter, but its pages count as the process's own memory, so that the bound on
it could not be seen to hold.
"""

import os
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from megatron_p3o.errors import InputError


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file."""

    path: Path
    offset: int
    """Bytes from the start of the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    """Elements, where the tensor is not contiguous."""

    @property
    def nbytes(self) -> int:
        return num_bytes(self.shape, self.dtype)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows `start` to `stop` of the first dimension, or the whole tensor.

        Raises:
            InputError: the file is shorter than it should be.
        """
        if self.stride is not None:
            span = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
            flat = self._read_flat(0, span)
            return torch.as_strided(flat, self.shape, self.stride)[start:stop].contiguous()
        if not self.shape:
            return self._read_flat(0, 1)[0]
        stop = self.shape[0] if stop is None else min(stop, self.shape[0])
        row = num_elements(self.shape[1:])
        return self._read_flat(start * row, (stop - start) * row).view(-1, *self.shape[1:])

    def _read_flat(self, first: int, count: int) -> Tensor:
        flat = torch.empty(count, dtype=self.dtype)
        position = self.offset + first * self.dtype.itemsize
        view = _bytes_of(flat)
        with self.path.open("rb", buffering=0) as file:
            while view:
                done = os.preadv(file.fileno(), [view], position)
                if done == 0:
                    raise InputError(
                        f"{str(self.path)!r} ends at byte {position}, before the end of a tensor; "
                        "it is half-written: copy it again"
                    )
                view, position = view[done:], position + done
        return flat


class OutputFile:
    """A file of known size, written at any offset by any thread."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.truncate(self._descriptor, size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)

    def write(self, content: bytes | memoryview, offset: int) -> None:
        view = memoryview(content)
        while view:
            done = os.pwrite(self._descriptor, view, offset)
            view, offset = view[done:], offset + done

    def sync(self) -> None:
        os.fsync(self._descriptor)


class TensorSlot:
    """The place of one tensor in an output file; filled from its first row to its last."""

    def __init__(
        self,
        file: OutputFile,
        offset: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        checksum: bool = False,
    ) -> None:
        """
        Args:
            file: where it lies.
            offset: of its first byte.
            shape: of the whole tensor.
            dtype: of every tensor appended.
            checksum: keep the CRC-32 that a zip archive declares.
        """
        self.shape = shape
        self.dtype = dtype
        self.crc = 0
        self._file = file
        self._offset = offset
        self._written = 0
        self._checksum = checksum
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return num_bytes(self.shape, self.dtype)

    def append(self, tensor: Tensor) -> None:
        """Write the next rows, or the whole tensor."""
        assert tensor.dtype is self.dtype, (tensor.dtype, self.dtype)
        view = _bytes_of(tensor.detach().contiguous())
        with self._lock:
            assert self._written + len(view) <= self.nbytes, self.shape
            self._file.write(view, self._offset + self._written)
            if self._checksum:
                self.crc = zlib.crc32(view, self.crc)
            self._written += len(view)

    def append_zeros(self, num_rows: int) -> None:
        """Padding rows; a new file reads as zeros, so only the checksum needs them."""
        self.append(torch.zeros(num_rows, *self.shape[1:], dtype=self.dtype))

    @property
    def is_complete(self) -> bool:
        return self._written == self.nbytes


def num_elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return num_elements(shape) * dtype.itemsize


def sync_directory(directory: Path) -> None:
    """Make the names in a directory and below it durable."""
    for path in [*(p for p in directory.rglob("*") if p.is_dir()), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)
