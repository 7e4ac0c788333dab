"""Hugging Face safetensors directories, read and written one tensor at a time."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_p3o.errors import InputError
from megatron_p3o.model_files import read_weight_headers

_CARRIED_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja"})


class HfReader:
    """The tensors of a model directory, over one or several safetensors files.

    Lazy: a file is opened when a tensor of it is first read, a tensor is read when asked for.

    Example:
        with HfReader("models/SmolLM2-135M-Instruct") as reader:
            norm = reader.get("model.norm.weight", shape=(576,))
    """

    def __init__(self, model_dir: str | Path) -> None:
        """
        Raises:
            InputError: weights are missing or incomplete.
        """
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        for path, shapes in read_weight_headers(model_dir).items():
            self._shapes |= shapes
            self._files |= dict.fromkeys(shapes, path)
        self._open_files: dict[Path, Any] = {}
        self._stack = ExitStack()
        self.model_dir = Path(model_dir)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open_files.clear()
        self._stack.close()

    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def get(self, name: str, *, shape: tuple[int, ...]) -> Tensor:
        """The tensor, on the CPU, in the dtype of the file.

        Args:
            name: its name in the checkpoint.
            shape: what config.json makes of its shape.

        Raises:
            InputError: no such tensor, or its shape is another one.
        """
        if name not in self._shapes:
            raise InputError(
                f"model.path={str(self.model_dir)!r}: the weights lack {name}, which config.json "
                "calls for; copy the model again"
            )
        path = self._files[name]
        if self._shapes[name] != shape:
            raise InputError(
                f"model.path={str(self.model_dir)!r}: {name} in {path.name} has shape "
                f"{list(self._shapes[name])}, config.json calls for {list(shape)}; use the "
                "config.json that belongs to the weights"
            )
        if path not in self._open_files:
            try:
                file = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise InputError(
                    f"{path} is not a valid safetensors file ({error}); copy it again"
                ) from error
            self._open_files[path] = self._stack.enter_context(file)
        return self._open_files[path].get_tensor(name)


def save_hf(
    model_dir: str | Path,
    named_tensors: Iterable[tuple[str, Tensor]],
    source_dir: str | Path,
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a model directory that transformers can load, all of it or nothing.

    The tensors are consumed as a stream; at most one shard is held. Configuration and tokenizer
    files are copied from `source_dir`, with config.json's dtype set to that of the tensors. Written
    beside the destination, synced, then renamed.

    Args:
        model_dir: the destination.
        named_tensors: tensors by Hugging Face name, on any device.
        source_dir: the model directory whose configuration and tokenizer belong to the tensors.
        max_shard_bytes: greatest size of one file, unless a single tensor is larger.

    Raises:
        InputError: the destination exists.
    """
    model_dir = Path(model_dir)
    if model_dir.exists():
        raise InputError(f"{str(model_dir)!r} already exists; choose another directory to write")
    model_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{model_dir.name}.", dir=model_dir.parent))
    try:
        # mkdtemp makes directories that only their owner can read.
        partial.chmod(0o755)
        dtypes = _write_shards(partial, named_tensors, max_shard_bytes)
        _carry_files(Path(source_dir), partial, dtypes)
        for path in [*partial.iterdir(), partial]:
            _sync(path)
        partial.rename(model_dir)
    except BaseException:
        shutil.rmtree(partial)
        raise
    _sync(model_dir.parent)


def _write_shards(
    directory: Path, named_tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int
) -> set[torch.dtype]:
    """Write the weights and, for several shards, their index; returns the dtypes met."""
    shards: list[tuple[Path, list[str]]] = []
    pending: dict[str, Tensor] = {}
    pending_bytes = total_bytes = 0
    dtypes: set[torch.dtype] = set()

    def flush() -> None:
        path = directory / f"shard-{len(shards)}"
        save_file(pending, path, metadata={"format": "pt"})
        shards.append((path, list(pending)))
        pending.clear()

    for name, tensor in named_tensors:
        if pending and pending_bytes + tensor.nbytes > max_shard_bytes:
            flush()
            pending_bytes = 0
        # A copy: the stream may hand out views of live parameters, and views share storage.
        pending[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
        dtypes.add(tensor.dtype)
    flush()

    if len(shards) == 1:
        shards[0][0].rename(directory / "model.safetensors")
        return dtypes
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(shards, start=1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        path.rename(directory / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index)
    return dtypes


def _carry_files(source: Path, destination: Path, dtypes: set[torch.dtype]) -> None:
    """Copy everything but weights; config.json gets the dtype of the tensors if they share one."""
    for path in source.iterdir():
        is_index = path.name.endswith(".index.json")
        if path.is_file() and path.suffix in _CARRIED_SUFFIXES and not is_index:
            shutil.copyfile(path, destination / path.name)
    if len(dtypes) == 1:
        config = json.loads((destination / "config.json").read_text(encoding="utf-8"))
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = str(dtypes.pop()).removeprefix("torch.")
        _write_json(destination / "config.json", config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
