"""Megatron's torch_dist checkpoints as a source, without a model or a process group.

Format: torch.distributed.checkpoint's. `.metadata` is a pickle that lists every global tensor with
the chunks it is stored in, and where each chunk lies in the `.distcp` files; a chunk is an archive
of torch.save. Megatron stacks equal layers on a leading axis, and experts on the next one
(megatron/core/transformer/transformer_block.py and moe/experts.py, `sharded_state_dict`):

    decoder.layers.mlp.linear_fc1.weight                     [layers, 2 ffn, hidden]
    decoder.layers.mlp.experts.experts.linear_fc1.weight     [layers, experts, 2 ffn, hidden]
    decoder.layers.3.mlp.linear_fc1.weight                   [2 ffn, hidden]: layers that differ
    decoder.layers.3.mlp.linear_fc1.weight_w, .weight_v      [ffn, hidden]: singleton_local_shards

Norms in front of linear layers have Transformer Engine's names.
"""

import io
import pickle
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron_p3o.errors import InputError
from megatron_p3o.weights.families import ParamRow, param_rows
from megatron_p3o.weights.layouts import GateUp, Vocab
from megatron_p3o.weights.resharding.describe import describe_model
from megatron_p3o.weights.resharding.files import StoredTensor
from megatron_p3o.weights.resharding.model_config import find_config
from megatron_p3o.weights.resharding.pickles import load_archive, load_pickle
from megatron_p3o.weights.resharding.target import (
    global_shape,
    rename_layer,
    row_expert,
    row_layer,
)
from megatron_p3o.weights.resharding.values import RowValue

_LOCAL_EXPERTS = re.compile(r"\.local_experts\.(\d+)\.")
_GROUPED_EXPERT = re.compile(r"\.experts\.linear_fc[12]\.weight\d+$")
_MOE_NORM = "pre_mlp_layernorm.weight"
_OPTIMIZER = ("optimizer.", "chained_")
_COMMON = "common_state/shard_0_1"
_BESIDE_WEIGHTS = re.compile(
    r"(^|/|\.)(_extra_state|rng_state|rerun_state_machine_state|common_state)\b"
)


def dist_names(row: ParamRow) -> Iterator[str]:
    """What the row may be called in a torch_dist checkpoint, with its layer index."""
    for name in (row.te_name, row.megatron):
        if name is not None and not _GROUPED_EXPERT.search(name):
            yield _LOCAL_EXPERTS.sub(".experts.", name)
    if row.te_name is None and row.megatron.endswith(_MOE_NORM):
        # Megatron's local layers store it as they store the norm in front of a dense MLP.
        yield row.megatron.replace(_MOE_NORM, "mlp.linear_fc1.layer_norm_weight")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a row's tensors lie."""

    keys: Sequence[str]
    index: tuple[int, ...]
    """Of the leading axes: layer, expert."""


class DistSource:
    """A directory with `metadata.json` and `.metadata`."""

    format = "torch_dist"

    def __init__(self, directory: Path, *, config_dir: Path | None, unsafe: bool) -> None:
        """
        Args:
            directory: of the checkpoint.
            config_dir: a Hugging Face directory with the model's config.json, where the
                checkpoint does not lead to one.
            unsafe: allow any object in its pickles.

        Raises:
            InputError: it is incomplete, damaged, or not what the configuration calls for.
        """
        self.directory = directory
        self._unsafe = unsafe
        self.metadata: Metadata = load_pickle(directory / ".metadata", unsafe=unsafe)
        if not isinstance(self.metadata, Metadata):
            raise self._error("its .metadata is not that of torch.distributed.checkpoint")
        self.common: dict[str, Any] = self._load_common()
        arguments = self.common.get("args")
        self.config, self.files = find_config(directory, config_dir, arguments)
        architecture = describe_model(self.config, f"configuration of {str(directory)!r}")
        if not any(key.startswith("mtp.") for key in self.metadata.state_dict_metadata):
            architecture = replace(architecture, num_mtp_layers=0)
        self.architecture = architecture
        self.rows = param_rows(architecture)
        iteration = self.common.get("iteration")
        self.iteration: int | None = iteration if isinstance(iteration, int) else None
        self.notes: list[str] = []
        self._tensors: Mapping[str, TensorStorageMetadata] = {
            key: entry
            for key, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._places = {row.megatron: self._find(row) for row in self.rows}
        self._check_leftovers()
        self._check_files()
        self.layout = self._describe_layout()

    def write_common(self, path: Path) -> None:
        """Write what is not sharded, with the optimizer's parameter groups, as `common.pt`.

        Raises:
            InputError: it holds objects that torch does not load with `weights_only`.
        """
        entry = self._common_entry()
        if entry is None:
            shutil.copyfile(self.directory / "common.pt", path)
            return
        with (self.directory / entry.relative_path).open("rb") as file:
            file.seek(entry.offset)
            archive = io.BytesIO(file.read(entry.length))
        try:
            (common,) = torch.load(archive, weights_only=not self._unsafe)
        except pickle.UnpicklingError as error:
            raise self._error(f"its common state cannot be loaded ({error})") from error
        torch.save(common, path)

    def _load_common(self) -> dict[str, Any]:
        entry = self._common_entry()
        if entry is None:
            return load_archive(self.directory / "common.pt", unsafe=self._unsafe)
        (common,) = load_archive(
            self.directory / entry.relative_path,
            offset=entry.offset,
            length=entry.length,
            unsafe=self._unsafe,
        )
        return common

    def _common_entry(self) -> Any:
        """Where newer versions of Megatron-Core keep what is not sharded; None: in `common.pt`."""
        if (self.directory / "common.pt").exists():
            return None
        found = (i for index, i in self.metadata.storage_data.items() if index.fqn == _COMMON)
        return next(found, None)

    def dtype(self, row: ParamRow) -> torch.dtype:
        return self._tensors[self._places[row.megatron].keys[0]].properties.dtype

    def read(self, row: ParamRow) -> RowValue:
        place = self._places[row.megatron]
        parts = [self._read_key(key, place.index) for key in place.keys]
        merged = parts[0] if len(parts) == 1 else torch.cat(parts)
        return RowValue(row, merged=merged[: global_shape(row)[0]])

    def read_rows(self, row: ParamRow, start: int, stop: int) -> Tensor:
        place = self._places[row.megatron]
        return self._read_key(place.keys[0], place.index, (start, stop))

    def describe(self) -> list[tuple[str, str, tuple[int, ...], torch.dtype]]:
        return [
            (row.megatron, key, tuple(self._tensors[key].size), self._tensors[key].properties.dtype)
            for row in self.rows
            for key in self._places[row.megatron].keys
        ]

    def optimizer_keys(self) -> list[str]:
        """Keys of the optimizer's tensors and objects."""
        return [k for k in self.metadata.state_dict_metadata if k.startswith(_OPTIMIZER)]

    def _error(self, problem: str) -> InputError:
        return InputError(f"{str(self.directory)!r}: {problem}")

    def _find(self, row: ParamRow) -> _Place:
        layer, expert = row_layer(row), row_expert(row)
        experts = () if expert is None else (expert,)
        tried = []
        for name in dist_names(row):
            stacked = rename_layer(name, "") if layer is not None else name
            singleton = name.replace("experts.experts.", f"experts.experts.{expert}.")
            candidates = [(name, experts), (singleton, ())]
            if layer is not None:
                candidates.insert(0, (stacked, (layer, *experts)))
            for key, index in candidates:
                tried.append(key)
                if key in self._tensors:
                    self._check_shape(row, key, index)
                    return _Place([key], index)
                if isinstance(row.layout, GateUp) and key + "_w" in self._tensors:
                    return _Place([key + "_w", key + "_v"], index)
        raise self._error(
            f"it lacks {row.megatron} (no {' or '.join(dict.fromkeys(tried))}), which the "
            f"{self.architecture.family} configuration calls for; copy the checkpoint again, or "
            "give the model's own config.json with --config"
        )

    def _check_shape(self, row: ParamRow, key: str, index: tuple[int, ...]) -> None:
        stored, expected = tuple(self._tensors[key].size), global_shape(row)
        rest = stored[len(index) :]
        is_padded = isinstance(row.layout, Vocab) and len(rest) == len(expected)
        fits = rest == expected or (
            is_padded and rest[0] >= expected[0] and rest[1:] == expected[1:]
        )
        if not fits or any(i >= n for i, n in zip(index, stored, strict=False)):
            raise self._error(
                f"{key} has shape {list(stored)}, the configuration calls for {list(expected)} at "
                f"index {list(index)}; use the config.json that belongs to the weights (--config)"
            )

    def _check_leftovers(self) -> None:
        used = {key for place in self._places.values() for key in place.keys}
        optimizer = set(self.optimizer_keys())
        aliases = {name for row in self.rows for name in self._aliases(row)}
        for key, entry in self.metadata.state_dict_metadata.items():
            if key in used or key in optimizer or key in aliases or _BESIDE_WEIGHTS.search(key):
                continue
            raise self._error(
                f"it holds {key} ({type(entry).__name__}), which has no place in a "
                f"{self.architecture.family} model of its configuration; give the model's own "
                "config.json with --config"
            )
        for key in used & self._tensors.keys():
            self._check_layers(key)
        if optimizer:
            self.notes.append(
                f"{len(optimizer)} entries of the optimizer's state; only --to torch_dist "
                "--optimizer carries them along"
            )

    def _aliases(self, row: ParamRow) -> Iterator[str]:
        """Other names under which a row may be stored as well."""
        for name in dist_names(row):
            yield name
            yield rename_layer(name, "")

    def _check_layers(self, key: str) -> None:
        """A stack must not be deeper than what the table reads of it."""
        indices = [place.index for place in self._places.values() if key in place.keys]
        for axis, size in enumerate(self._tensors[key].size[: len(indices[0])]):
            expected = 1 + max(index[axis] for index in indices)
            if size != expected:
                raise self._error(
                    f"{key} stacks {size} layers or experts, the configuration has {expected}; use "
                    "the config.json that belongs to the weights (--config)"
                )

    def _check_files(self) -> None:
        sizes: dict[str, int] = {}
        for info in self.metadata.storage_data.values():
            end = info.offset + info.length
            sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), end)
        for name, size in sizes.items():
            path = self.directory / name
            actual = path.stat().st_size if path.is_file() else None
            if actual is None or actual < size:
                state = "is missing" if actual is None else f"has {actual} bytes of {size}"
                raise self._error(f"{name} {state}; copy the checkpoint again, whole")

    def _describe_layout(self) -> str:
        key = self._places[self.rows[0].megatron].keys[0]
        entry = self._tensors[key]
        return (
            f"vocabulary of {self.architecture.vocab_size} stored as {entry.size[0]} rows in "
            f"{len(entry.chunks)} chunk{'s' * (len(entry.chunks) > 1)}"
        )

    def _read_key(
        self, key: str, index: tuple[int, ...], rows: tuple[int, int] | None = None
    ) -> Tensor:
        """The tensor at `index` of the leading axes, or some of its rows."""
        entry = self._tensors[key]
        shape = list(entry.size[len(index) :])
        first, last = rows or (0, shape[0])
        shape[0] = last - first
        result: Tensor | None = None
        covered = 0
        for chunk in entry.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            lead = zip(index, offsets, sizes, strict=False)
            begin = max(first, offsets[len(index)])
            end = min(last, offsets[len(index)] + sizes[len(index)])
            if begin >= end or any(not o <= i < o + n for i, o, n in lead):
                continue
            piece = self._read_chunk(key, chunk, index, begin, end)
            covered += piece.numel()
            if tuple(piece.shape) == tuple(shape):
                result = piece
                break
            if result is None:
                result = torch.empty(shape, dtype=entry.properties.dtype)
            window = [slice(begin - first, end - first)]
            for dim in range(len(index) + 1, len(offsets)):
                window.append(slice(offsets[dim], offsets[dim] + sizes[dim]))
            result[tuple(window)] = piece
        if result is None or covered != result.numel():
            raise self._error(f"{key} is stored with gaps at index {list(index)}; copy it again")
        return result

    def _read_chunk(
        self, key: str, chunk: ChunkStorageMetadata, index: tuple[int, ...], begin: int, end: int
    ) -> Tensor:
        """Rows `begin` to `end` (global) of one chunk, at `index` of the leading axes."""
        info = self.metadata.storage_data[MetadataIndex(key, chunk.offsets)]
        if getattr(info, "transform_descriptors", None):
            raise self._error(f"{key} is stored compressed; save it again without extensions")
        stored = load_archive(
            self.directory / info.relative_path,
            offset=info.offset,
            length=info.length,
            unsafe=self._unsafe,
        )
        if not isinstance(stored, StoredTensor) or stored.shape != tuple(chunk.sizes):
            raise self._error(f"a chunk of {key} is not the tensor that .metadata describes")
        lead = len(index)
        row_start = int(chunk.offsets[lead])
        if stored.stride is not None:
            whole = stored.read()
            for i, offset in zip(index, chunk.offsets, strict=False):
                whole = whole[i - offset]
            return whole[begin - row_start : end - row_start]
        position = 0
        for i, offset, size in zip(index, chunk.offsets, chunk.sizes, strict=False):
            position = position * size + (i - offset)
        inner = stored.shape[lead:]
        step = torch.Size(inner).numel() * stored.dtype.itemsize
        part = replace(stored, offset=stored.offset + position * step, shape=inner)
        return part.read(begin - row_start, end - row_start)
