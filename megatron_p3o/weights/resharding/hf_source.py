"""Hugging Face safetensors directories as a source.

Format: 8 bytes little-endian header length, a JSON header with dtype, shape and byte range of every
tensor, then the bytes (the safetensors README). FP8 checkpoints store a weight in float8_e4m3fn and
beside it `<name>_scale_inv`, and say so under `quantization_config`.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_p3o.errors import InputError
from megatron_p3o.model_files import read_weight_headers
from megatron_p3o.numerics import num_blocks
from megatron_p3o.weights.families import ParamRow, param_rows
from megatron_p3o.weights.quantize import BLOCK
from megatron_p3o.weights.resharding.describe import describe_model, read_config
from megatron_p3o.weights.resharding.files import StoredTensor
from megatron_p3o.weights.resharding.values import BlockQuantized, HfTensor, RowValue, same_bits

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
SCALE_SUFFIX = "_scale_inv"
# Old Llama checkpoints store this buffer, which follows from config.json.
_DERIVED_SUFFIX = ".rotary_emb.inv_freq"


class HfSource:
    """A model directory."""

    format = "hf"
    iteration = None

    def __init__(self, directory: Path) -> None:
        """
        Raises:
            InputError: weights are missing, incomplete, or not those that config.json calls for.
        """
        self.directory = directory
        self.files = directory
        self.config = read_config(directory)
        self.notes: list[str] = []
        self._tensors = _stored_tensors(directory)
        architecture = describe_model(self.config, str(directory / "config.json"))
        first_beyond = f"model.layers.{architecture.num_layers}."
        if not any(name.startswith(first_beyond) for name in self._tensors):
            # transformers leaves them out, while config.json goes on to count them.
            architecture = replace(architecture, num_mtp_layers=0)
        self.architecture = architecture
        self.rows = param_rows(architecture)
        num_files = len({tensor.path for tensor in self._tensors.values()})
        self.layout = f"{num_files} file{'s' * (num_files > 1)}"
        self._copies = {
            copy: original for row in self.rows for original in row.hf for copy in row.copies
        }
        self._check_quantization_config()
        self._check_names()
        self._dtypes = {row.megatron: self._find_dtype(row) for row in self.rows}

    def dtype(self, row: ParamRow) -> torch.dtype:
        return self._dtypes[row.megatron]

    def read(self, row: ParamRow) -> RowValue:
        return RowValue(row, parts=[self._read_part(name) for name in row.hf])

    def read_rows(self, row: ParamRow, start: int, stop: int) -> Tensor:
        (name,) = row.hf
        return self._tensors[name].read(start, stop)

    def describe(self) -> list[tuple[str, str, tuple[int, ...], torch.dtype]]:
        return [
            (row.megatron, name, self._tensors[name].shape, self._tensors[name].dtype)
            for row in self.rows
            for name in row.hf
        ]

    def _read_part(self, name: str) -> HfTensor:
        tensor = self._tensors[name].read()
        scale = self._tensors.get(name + SCALE_SUFFIX)
        return tensor if scale is None else BlockQuantized(tensor, scale.read())

    def _error(self, problem: str) -> InputError:
        return InputError(f"{str(self.directory)!r}: {problem}")

    def _check_quantization_config(self) -> None:
        quantization = self.config.get("quantization_config")
        if quantization is None:
            return
        method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
        if method != "fp8" or block != list(BLOCK):
            raise self._error(
                f"quantization_config with quant_method={method!r} and weight_block_size={block!r} "
                f"is not supported; it must be 'fp8' with {list(BLOCK)}"
            )

    def _check_names(self) -> None:
        expected = {name: shape for row in self.rows for name, shape in row.hf.items()}
        for name, shape in expected.items():
            if name not in self._tensors:
                raise self._error(
                    f"the weights lack {name}, which config.json calls for; copy the model again"
                )
            if self._tensors[name].shape != shape:
                raise self._error(
                    f"{name} has shape {list(self._tensors[name].shape)}, config.json calls for "
                    f"{list(shape)}; use the config.json that belongs to the weights"
                )
        for name in self._tensors:
            if name not in expected:
                self._check_other(name, expected)

    def _check_other(self, name: str, expected: Mapping[str, tuple[int, ...]]) -> None:
        """A tensor that is in no row: a scale, a copy, or one that would be lost."""
        weight = name.removesuffix(SCALE_SUFFIX)
        if name.endswith(SCALE_SUFFIX) and weight in expected:
            shape = num_blocks(expected[weight], BLOCK)
            if self._tensors[weight].dtype is not torch.float8_e4m3fn:
                raise self._error(f"{name} scales {weight}, which is not FP8; copy the model again")
            if self._tensors[name].shape != shape:
                raise self._error(
                    f"{name} has shape {list(self._tensors[name].shape)}, blocks of {BLOCK[0]} x "
                    f"{BLOCK[1]} need {list(shape)}; copy the model again"
                )
        elif name == "lm_head.weight" and self.architecture.tie_word_embeddings:
            self._check_copy(name, "model.embed_tokens.weight")
            self.notes.append(f"{name} equals the embedding that it is tied to and is left out")
        elif name in self._copies:
            self._check_copy(name, self._copies[name])
        elif name.endswith(_DERIVED_SUFFIX):
            self.notes.append(f"{name} follows from config.json and is left out")
        else:
            raise self._error(
                f"the weights hold {name}, which has no place in a {self.architecture.family} "
                "model of this config.json; use the config.json that belongs to the weights"
            )

    def _check_copy(self, name: str, original: str) -> None:
        one, other = self._tensors[original], self._tensors[name]
        step = 4096
        is_same = one.shape == other.shape and all(
            same_bits(one.read(start, start + step), other.read(start, start + step))
            for start in range(0, one.shape[0], step)
        )
        if not is_same:
            tied = name == "lm_head.weight"
            remedy = "set it to false, or " if tied else ""
            rule = " although config.json says tie_word_embeddings=true" if tied else ""
            raise self._error(
                f"{name} differs from {original}{rule}, and Megatron has one tensor for both; "
                f"{remedy}remove {name}"
            )

    def _find_dtype(self, row: ParamRow) -> torch.dtype:
        dtypes = {self._tensors[name].dtype for name in row.hf}
        if len(dtypes) > 1:
            named = ", ".join(f"{name} {self._tensors[name].dtype}" for name in row.hf)
            raise self._error(
                f"tensors that Megatron keeps as one have several dtypes ({named}); save the model "
                "in one dtype"
            )
        for name in row.hf:
            is_fp8 = self._tensors[name].dtype is torch.float8_e4m3fn
            if is_fp8 and (not row.fp8 or name + SCALE_SUFFIX not in self._tensors):
                raise self._error(
                    f"{name} is FP8 "
                    + ("without its scales " + name + SCALE_SUFFIX if row.fp8 else "but may not be")
                    + "; copy the model again"
                )
        return dtypes.pop()


def _stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for path in read_weight_headers(directory):
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(header_size))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            dtype = DTYPES.get(entry["dtype"])
            if dtype is None:
                raise InputError(
                    f"{str(path)!r}: {name} has dtype {entry['dtype']}, which is not supported; "
                    f"save it as one of {', '.join(DTYPES)}"
                )
            offset = 8 + header_size + entry["data_offsets"][0]
            tensor = StoredTensor(path, offset, dtype, tuple(entry["shape"]))
            begin, end = entry["data_offsets"]
            if end - begin != tensor.nbytes:
                raise InputError(
                    f"{str(path)!r}: the header gives {name} {end - begin} bytes, its shape and "
                    f"dtype need {tensor.nbytes}; copy it again"
                )
            tensors[name] = tensor
    return tensors
