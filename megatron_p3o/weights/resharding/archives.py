"""Archives as `torch.save` writes them, laid out before any tensor is there.

All sizes follow from the tensors' shapes, so the file is planned first; then tensors are written to
their places as a stream, in any order, and the headers with their checksums last. The result is a
valid zip archive that `torch.load` reads, with `weights_only=True` and memory-mapped too.

Format: PKWARE's APPNOTE.TXT (zip, zip64); record names and 64-byte alignment as in
torch/csrc/jit/serialization/inline_container.h.
"""

import io
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._utils import _rebuild_tensor_v2

from megatron_p3o.weights.resharding.files import OutputFile, TensorSlot, num_bytes, num_elements

_ALIGNMENT = 64
_LIMIT_32 = 0xFFFFFFFF
"""Numbers from here on are written with 64 bits, and this marker in their 32-bit place."""
_MARKER_32 = 0xFFFFFFFF
_LIMIT_16 = 0xFFFF
_STORAGE_CLASSES: Mapping[torch.dtype, Any] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.uint8: torch.ByteStorage,
}


@dataclass(frozen=True, eq=False, slots=True)
class PlannedTensor:
    """Stands for a tensor in the object that is saved, until its bytes are written."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return num_bytes(self.shape, self.dtype)


@dataclass(frozen=True, eq=False, slots=True)
class _Storage:
    key: str
    tensor: PlannedTensor


class _Pickler(pickle.Pickler):
    """Writes planned tensors as torch.save writes tensors, and remembers their order."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[PlannedTensor] = []

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, PlannedTensor):
            return NotImplemented
        storage = _Storage(str(len(self.tensors)), value)
        self.tensors.append(value)
        stride = torch.empty(value.shape, device="meta").stride()
        arguments: tuple[Any, ...] = (storage, 0, value.shape, stride, False, OrderedDict())
        return _rebuild_tensor_v2, arguments

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        tensor = value.tensor
        kind = _STORAGE_CLASSES[tensor.dtype]
        return "storage", kind, value.key, "cpu", num_elements(tensor.shape)


@dataclass(slots=True)
class _Record:
    name: bytes
    header_offset: int
    """From the start of the archive."""
    extra: bytes
    size: int
    content: bytes | None = None
    tensor: PlannedTensor | None = None
    crc: int = 0
    slot: TensorSlot | None = None

    @property
    def data_offset(self) -> int:
        return self.header_offset + 30 + len(self.name) + len(self.extra)


class ArchivePlan:
    """The layout of one archive.

    Example:
        plan = ArchivePlan({"w": PlannedTensor((2, 3), torch.float32)})
        with OutputFile(path, plan.size) as file:
            slots = plan.place(file, 0)
            ...append each tensor to its slot...
            plan.finish(file, 0)
    """

    def __init__(self, content: Any) -> None:
        """
        Args:
            content: what `torch.load` will return, with `PlannedTensor` for every tensor.
        """
        pickled = io.BytesIO()
        pickler = _Pickler(pickled)
        pickler.dump(content)
        self._records: list[_Record] = []
        self._end = 0
        self._add("data.pkl", pickled.getvalue())
        self._add("byteorder", b"little")
        for key, tensor in enumerate(pickler.tensors):
            self._add(f"data/{key}", tensor)
        self._add("version", b"3\n")

    @property
    def size(self) -> int:
        """Bytes of the whole archive."""
        return self._end + len(self._directory())

    def place(self, file: OutputFile, offset: int) -> dict[PlannedTensor, TensorSlot]:
        """Where each tensor goes, for an archive that starts at byte `offset` of `file`."""
        slots = {}
        for record in self._records:
            if record.tensor is not None:
                tensor = record.tensor
                start = offset + record.data_offset
                record.slot = TensorSlot(file, start, tensor.shape, tensor.dtype, checksum=True)
                slots[tensor] = record.slot
        return slots

    def finish(self, file: OutputFile, offset: int) -> None:
        """Write everything but the tensors, which must be complete."""
        for record in self._records:
            if record.slot is not None:
                assert record.slot.is_complete, record.name
                record.crc = record.slot.crc
            file.write(
                _local_header(record) + (record.content or b""), offset + record.header_offset
            )
        file.write(self._directory(), offset + self._end)

    def _add(self, name: str, content: bytes | PlannedTensor) -> None:
        encoded = f"archive/{name}".encode()
        size = content.nbytes if isinstance(content, PlannedTensor) else len(content)
        zip64 = struct.pack("<HHQQ", 1, 16, size, size) if size >= _LIMIT_32 else b""
        unpadded = self._end + 30 + len(encoded) + len(zip64) + 4
        # An extra field of type "FB" and zeros, as torch pads.
        padding = -unpadded % _ALIGNMENT
        extra = zip64 + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        record = _Record(name=encoded, header_offset=self._end, extra=extra, size=size)
        if isinstance(content, PlannedTensor):
            record.tensor = content
        else:
            record.content = content
            record.crc = zlib.crc32(content)
        self._records.append(record)
        self._end = record.data_offset + size

    def _directory(self) -> bytes:
        """Central directory and its end, with the zip64 parts where numbers need them."""
        entries = b"".join(_central_header(record) for record in self._records)
        count, start = len(self._records), self._end
        tail = b""
        if count > _LIMIT_16 or len(entries) >= _LIMIT_32 or start >= _LIMIT_32:
            zip64_start = start + len(entries)
            tail += struct.pack(
                "<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(entries), start
            )
            tail += struct.pack("<4sIQI", b"PK\x06\x07", 0, zip64_start, 1)
        few = min(count, _LIMIT_16)
        tail += struct.pack(
            "<4sHHHHIIH",
            b"PK\x05\x06",
            *(0, 0, few, few),
            _narrow(len(entries)),
            _narrow(start),
            0,
        )
        return entries + tail


def _narrow(value: int) -> int:
    return value if value < _LIMIT_32 else _MARKER_32


def _local_header(record: _Record) -> bytes:
    size = _narrow(record.size)
    fixed = struct.pack(
        "<4sHHHHHIIIHH",
        b"PK\x03\x04",
        *(45, 0, 0, 0, 0x21),
        record.crc,
        size,
        size,
        len(record.name),
        len(record.extra),
    )
    return fixed + record.name + record.extra


def _central_header(record: _Record) -> bytes:
    large = record.size >= _LIMIT_32
    far = record.header_offset >= _LIMIT_32
    numbers = [record.size] * 2 * large + [record.header_offset] * far
    extra = struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
    size = _narrow(record.size)
    fixed = struct.pack(
        "<4sHHHHHHIIIHHHHHII",
        b"PK\x01\x02",
        *(45, 45, 0, 0, 0, 0x21),
        record.crc,
        size,
        size,
        len(record.name),
        len(extra),
        *(0, 0, 0, 0),
        _narrow(record.header_offset),
    )
    return fixed + record.name + extra
