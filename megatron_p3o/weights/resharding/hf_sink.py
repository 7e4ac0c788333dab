"""Hugging Face safetensors directories as a sink."""

import json
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_p3o.numerics import num_blocks
from megatron_p3o.weights.families import ParamRow
from megatron_p3o.weights.quantize import BLOCK
from megatron_p3o.weights.resharding.files import OutputFile, TensorSlot, num_bytes
from megatron_p3o.weights.resharding.hf_source import DTYPES, SCALE_SUFFIX
from megatron_p3o.weights.resharding.values import BlockQuantized, RowValue

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CARRIED_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".py", ".md"})
_ALIGNMENT = 8


class _Shard:
    """One file: the tensors it will hold and its header."""

    def __init__(self) -> None:
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self.nbytes = 0

    def add(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.tensors[name] = (dtype, shape)
        self.nbytes += num_bytes(shape, dtype)

    def header(self) -> bytes:
        # Larger elements first keeps every tensor aligned to its own size.
        offset, entries = 0, {}
        ordered = sorted(self.tensors.items(), key=lambda item: -item[1][0].itemsize)
        for name, (dtype, shape) in ordered:
            end = offset + num_bytes(shape, dtype)
            entries[name] = {
                "dtype": _DTYPE_NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [offset, end],
            }
            offset = end
        content = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
        content += b" " * (-len(content) % _ALIGNMENT)
        return len(content).to_bytes(8, "little") + content


class HfSink:
    """A model directory that transformers can load."""

    def __init__(
        self,
        dtypes: Mapping[str, torch.dtype],
        rows: tuple[ParamRow, ...],
        config: Mapping[str, Any],
        files: Path | None,
        *,
        max_shard_bytes: int,
    ) -> None:
        """
        Args:
            dtypes: of every row by its Megatron name; float8_e4m3fn means FP8 blocks.
            rows: the model's table.
            config: the model's config.json; its dtype and quantization_config are adapted.
            files: where tokenizer and generation files are copied from.
            max_shard_bytes: greatest size of one file, unless a single tensor is larger.
        """
        self._config = adapted_config(config, rows, dtypes)
        self._files = files
        self._shards = [_Shard()]
        for row in rows:
            self._plan(row, dtypes[row.megatron], max_shard_bytes)
        self._slots: dict[str, TensorSlot] = {}
        self._outputs: list[OutputFile] = []
        self._stack = ExitStack()
        self._directory = Path()

    @property
    def nbytes(self) -> int:
        return sum(len(shard.header()) + shard.nbytes for shard in self._shards)

    def open(self, directory: Path) -> None:
        self._directory = directory
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(self._shards, start=1):
            name = f"model-{number:05}-of-{len(self._shards):05}.safetensors"
            name = "model.safetensors" if len(self._shards) == 1 else name
            weight_map |= dict.fromkeys(shard.tensors, name)
            self._open_shard(directory / name, shard)
        if len(self._shards) > 1:
            total = sum(shard.nbytes for shard in self._shards)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            _write_json(directory / "model.safetensors.index.json", index)

    def write(self, row: ParamRow, value: RowValue) -> None:
        for name, part in zip(row.hf, value.parts(), strict=True):
            if isinstance(part, BlockQuantized):
                self._slots[name].append(part.quantized)
                self._slots[name + SCALE_SUFFIX].append(part.scale_inv)
            else:
                for copy in (name, *row.copies):
                    self._slots[copy].append(part)

    def write_rows(self, row: ParamRow, tensor: Tensor, start: int) -> None:
        for name in (*row.hf, *row.copies):
            self._slots[name].append(tensor)

    def finish(self) -> None:
        assert all(slot.is_complete for slot in self._slots.values())
        if self._files is not None:
            carry_files(self._files, self._directory)
        _write_json(self._directory / "config.json", self._config)
        for output in self._outputs:
            output.sync()

    def close(self) -> None:
        self._stack.close()

    def _plan(self, row: ParamRow, dtype: torch.dtype, max_shard_bytes: int) -> None:
        copies = {copy: shape for copy in row.copies for shape in row.hf.values()}
        for name, shape in (*row.hf.items(), *copies.items()):
            planned = [(name, dtype, shape)]
            if dtype is torch.float8_e4m3fn:
                planned.append((name + SCALE_SUFFIX, torch.float32, num_blocks(shape, BLOCK)))
            size = sum(num_bytes(shape, dtype) for _, dtype, shape in planned)
            if self._shards[-1].tensors and self._shards[-1].nbytes + size > max_shard_bytes:
                self._shards.append(_Shard())
            for entry in planned:
                self._shards[-1].add(*entry)

    def _open_shard(self, path: Path, shard: _Shard) -> None:
        header = shard.header()
        output = self._stack.enter_context(OutputFile(path, len(header) + shard.nbytes))
        self._outputs.append(output)
        output.write(header, 0)
        for name, entry in json.loads(header[8:]).items():
            if name != "__metadata__":
                dtype, shape = shard.tensors[name]
                offset = len(header) + entry["data_offsets"][0]
                self._slots[name] = TensorSlot(output, offset, shape, dtype)


def adapted_config(
    config: Mapping[str, Any], rows: tuple[ParamRow, ...], dtypes: Mapping[str, torch.dtype]
) -> dict[str, Any]:
    """A config.json that says in which numbers the weights are.

    Args:
        config: of the model; a quantization_config of its own is kept where FP8 remains.
        rows: the model's table.
        dtypes: of every row by its Megatron name; float8_e4m3fn means FP8 blocks.
    """
    adapted = dict(config)
    plain = {dtype for dtype in dtypes.values() if dtype is not torch.float8_e4m3fn}
    matrices = {dtypes[row.megatron] for row in rows if len(row.hf) and row.fp8} & plain
    # The one dtype of all tensors, or of the linear layers beside norms kept in another.
    chosen = plain if len(plain) == 1 else matrices
    if len(chosen) == 1:
        key = "torch_dtype" if "torch_dtype" in adapted else "dtype"
        adapted[key] = str(next(iter(chosen))).removeprefix("torch.")
    stored = adapted.pop("quantization_config", None)
    if torch.float8_e4m3fn in dtypes.values():
        adapted["quantization_config"] = stored or {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": list(BLOCK),
            "modules_to_not_convert": _kept_modules(rows, dtypes),
        }
    return adapted


def carry_files(source: Path, destination: Path) -> None:
    """Copy what belongs to a model besides its weights: tokenizer, generation settings, code."""
    for path in sorted(source.iterdir()):
        is_index = path.name.endswith(".index.json")
        if path.is_file() and path.suffix in _CARRIED_SUFFIXES and not is_index:
            shutil.copyfile(path, destination / path.name)


def _kept_modules(rows: tuple[ParamRow, ...], dtypes: Mapping[str, torch.dtype]) -> list[str]:
    """Linear modules that stay in high precision; a loader must not look for their scales."""
    return [
        name.removesuffix(".weight")
        for row in rows
        if dtypes[row.megatron] is not torch.float8_e4m3fn
        for name, shape in row.hf.items()
        if name.endswith(".weight") and len(shape) == 2
    ]


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
