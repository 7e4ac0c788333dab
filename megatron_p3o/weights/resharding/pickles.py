"""What is inside a torch archive or a pickle, without running code from it.

A pickle names Python objects to call. Here a name is either on a short list of harmless ones, or
belongs to a library whose objects in checkpoints carry nothing that is needed (Megatron's enums,
numpy's random state) and is replaced by an inert stand-in, or is refused. Nothing else is ever
imported or called, which is stricter than `torch.load(weights_only=True)`. Tensors come out as
`StoredTensor`: their bytes stay in the file until they are asked for.

A file written by `torch.save` is a zip archive: `data.pkl` holds the objects, `data/<key>` the
bytes of each storage, uncompressed (torch/csrc/jit/serialization/inline_container.h).
"""

import io
import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from megatron_p3o.errors import InputError
from megatron_p3o.weights.resharding.files import StoredTensor

_CHECKPOINT = "torch.distributed.checkpoint"
_HARMLESS = frozenset(
    {
        ("collections", "OrderedDict"),
        ("collections", "defaultdict"),
        ("argparse", "Namespace"),
        ("types", "SimpleNamespace"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("builtins", "set"),
        ("builtins", "frozenset"),
        ("builtins", "list"),
        ("builtins", "dict"),
        ("builtins", "int"),
        ("builtins", "slice"),
        ("builtins", "bytearray"),
        ("builtins", "complex"),
        ("torch", "Size"),
        ("torch", "device"),
        ("torch.serialization", "_get_layout"),
        *(
            (f"{_CHECKPOINT}.metadata", name)
            for name in (
                "Metadata",
                "MetadataIndex",
                "TensorProperties",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    }
)
_STAND_INS = frozenset({"megatron", "transformer_engine", "apex", "numpy", "_codecs", "signal"})
_DTYPES: Mapping[str, torch.dtype] = {
    name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
_STORAGES: Mapping[str, torch.dtype | None] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": None,
}


@dataclass(frozen=True, slots=True)
class _Storage:
    """Where the bytes of a storage lie."""

    path: Path
    offset: int
    dtype: torch.dtype | None
    nbytes: int


class StandIn:
    """Takes the place of an object of another library; does nothing."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass


def load_pickle(path: Path, *, unsafe: bool = False) -> Any:
    """The object of a plain pickle file.

    Raises:
        InputError: it cannot be read, is damaged, or names an object that is not allowed.
    """
    with _open(path) as file:
        return _unpickle(file, path, {}, unsafe=unsafe)


def load_archive(
    path: Path, *, offset: int = 0, length: int | None = None, unsafe: bool = False
) -> Any:
    """The object that `torch.save` wrote, with `StoredTensor` in place of every tensor.

    Args:
        path: the file.
        offset: byte at which the archive starts.
        length: of the archive; None: up to the end of the file.
        unsafe: import and call whatever the pickle names.

    Raises:
        InputError: it cannot be read, is damaged, or names an object that is not allowed.
    """
    with _open(path) as file:
        size = path.stat().st_size - offset if length is None else length
        section = _Section(file, offset, size)
        try:
            archive = zipfile.ZipFile(section)
            records = {info.filename: info for info in archive.infolist()}
            (pickled,) = (name for name in records if name.endswith("/data.pkl"))
            content = archive.read(pickled)
        except (zipfile.BadZipFile, ValueError) as error:
            raise InputError(
                f"{str(path)!r} is not an archive of torch.save ({error}); it is half-written, or "
                "older than torch 1.6: copy it again, or save it again with a present torch"
            ) from error
        root = pickled.removesuffix("data.pkl")
        order = records.get(root + "byteorder")
        if order is not None and archive.read(order) != b"little":
            raise InputError(f"{str(path)!r} is big-endian; save it again on a usual machine")
        storages = {
            name.removeprefix(root + "data/"): (
                offset + _data_offset(section, info),
                info.file_size,
            )
            for name, info in records.items()
            if name.startswith(root + "data/")
        }
        return _unpickle(io.BytesIO(content), path, storages, unsafe=unsafe)


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read ({error.strerror}); add it") from error


def _unpickle(
    file: IO[bytes], path: Path, storages: Mapping[str, tuple[int, int]], *, unsafe: bool
) -> Any:
    try:
        return _Unpickler(file, path, storages, unsafe=unsafe).load()
    except InputError:
        raise
    except (
        pickle.UnpicklingError,
        EOFError,
        AttributeError,
        ImportError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:
        raise InputError(
            f"{str(path)!r} holds a pickle that cannot be read ({type(error).__name__}: {error}); "
            "copy it again"
        ) from error


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        file: IO[bytes],
        path: Path,
        storages: Mapping[str, tuple[int, int]],
        *,
        unsafe: bool,
    ) -> None:
        super().__init__(file, encoding="utf-8")
        self._path = path
        self._places = storages
        self._unsafe = unsafe

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _StorageClass(_STORAGES[name])
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return _StorageClass(None)
        if module == "torch._utils" and name in _REBUILD:
            return _REBUILD[name]
        if self._unsafe or (module, name) in _HARMLESS:
            return super().find_class(module, name)
        if module.partition(".")[0] in _STAND_INS:
            return StandIn
        raise InputError(
            f"{str(self._path)!r} names the Python object {module}.{name}, which is not one of "
            "those that are safe to load; if you trust whoever wrote the file, add --unsafe-pickle"
        )

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage_class, key, _, _ = pid
        if kind != "storage" or key not in self._places:
            raise pickle.UnpicklingError(f"storage {key} is missing")
        offset, nbytes = self._places[key]
        return _Storage(self._path, offset, storage_class.dtype, nbytes)


@dataclass(frozen=True, slots=True)
class _StorageClass:
    dtype: torch.dtype | None


def _tensor(
    storage: _Storage,
    storage_offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> StoredTensor:
    shape = tuple(size)
    contiguous = torch.empty(shape, device="meta").stride()
    is_contiguous = tuple(stride) == contiguous or 0 in shape
    last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else -1
    if (storage_offset + last + 1) * dtype.itemsize > storage.nbytes:
        raise pickle.UnpicklingError(f"a tensor of shape {list(shape)} exceeds its storage")
    return StoredTensor(
        storage.path,
        storage.offset + storage_offset * dtype.itemsize,
        dtype,
        shape,
        None if is_contiguous else tuple(stride),
    )


def _rebuild_tensor(
    storage: _Storage, storage_offset: int, size: Any, stride: Any, *rest: Any
) -> StoredTensor:
    assert storage.dtype is not None, "only version 3 has storages without a dtype"
    return _tensor(storage, storage_offset, size, stride, storage.dtype)


def _rebuild_tensor_v3(
    storage: _Storage,
    storage_offset: int,
    size: Any,
    stride: Any,
    requires_grad: bool,
    hooks: Any,
    dtype: torch.dtype,
    metadata: Any = None,
) -> StoredTensor:
    return _tensor(storage, storage_offset, size, stride, dtype)


def _rebuild_parameter(data: StoredTensor, *rest: Any) -> StoredTensor:
    return data


_REBUILD: Mapping[str, Callable[..., Any]] = {
    "_rebuild_tensor": _rebuild_tensor,
    "_rebuild_tensor_v2": _rebuild_tensor,
    "_rebuild_tensor_v3": _rebuild_tensor_v3,
    "_rebuild_parameter": _rebuild_parameter,
    "_rebuild_parameter_with_state": _rebuild_parameter,
}


class _Section(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file = file
        self._offset = offset
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise ValueError("negative position")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._offset + self._position)
        content = self._file.read(count)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


def _data_offset(section: _Section, info: zipfile.ZipInfo) -> int:
    """Where a record's bytes start: after its local header of 30 bytes, its name and padding."""
    section.seek(info.header_offset)
    header = section.read(30)
    if header is None or len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"no header for {info.filename}")
    if info.compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile(f"{info.filename} is compressed")
    name_length = int.from_bytes(header[26:28], "little")
    extra_length = int.from_bytes(header[28:30], "little")
    return info.header_offset + 30 + name_length + extra_length
