"""Megatron's torch_dist checkpoints as a sink.

Each chunk is what one tensor rank of the asked layout would write, so that ranks of that layout
read only their own bytes; `megatron.core.dist_checkpointing.load` takes them in any other layout
too. Beside the tensors Megatron asks for an `_extra_state` object of every module that may have
one; they are empty and share one archive.
"""

import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_p3o.weights.families import ParamRow
from megatron_p3o.weights.layouts import GateUp, Replicated, RowParallel, Vocab
from megatron_p3o.weights.resharding.archives import ArchivePlan, PlannedTensor
from megatron_p3o.weights.resharding.dist_source import DistSource, dist_names
from megatron_p3o.weights.resharding.endpoints import SLICE_BYTES
from megatron_p3o.weights.resharding.files import (
    OutputFile,
    StoredTensor,
    TensorSlot,
    sync_directory,
)
from megatron_p3o.weights.resharding.hf_sink import carry_files
from megatron_p3o.weights.resharding.model_config import FILES_DIR
from megatron_p3o.weights.resharding.target import (
    TargetLayout,
    global_shape,
    rename_layer,
    row_expert,
    row_layer,
)
from megatron_p3o.weights.resharding.values import RowValue

_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_OPTIMIZER_FILE = "__optimizer_0.distcp"
_METADATA_VERSION = "1.0.0"


class _Chunk:
    """A part of a global tensor that is stored as one archive."""

    def __init__(
        self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self.key = key
        self.offsets = offsets
        self.sizes = sizes
        self.tensor = PlannedTensor(sizes, dtype)
        self.plan = ArchivePlan(self.tensor)
        self.file = ""
        self.position = 0
        self.slot: TensorSlot | None = None

    def append(self, tensor: Tensor) -> None:
        assert self.slot is not None, self.key
        self.slot.append(tensor)


class DistSink:
    """A directory that `megatron.core.dist_checkpointing.load` reads."""

    def __init__(
        self,
        dtypes: Mapping[str, torch.dtype],
        rows: tuple[ParamRow, ...],
        layout: TargetLayout,
        *,
        config: Mapping[str, Any],
        files: Path | None,
        iteration: int | None,
        optimizer: DistSource | None = None,
    ) -> None:
        """
        Args:
            dtypes: of every row by its Megatron name.
            rows: the model's table.
            layout: resolved; its tensor ranks and stages set chunks and files.
            config: the model's config.json, carried along.
            files: where tokenizer and generation files are copied from.
            iteration: of the source, if it has one.
            optimizer: a checkpoint whose optimizer state is carried along as it is.
        """
        self._layout = layout
        self._config = config
        self._files = files
        # Layers whose parameters differ cannot be stacked.
        self._stack_layers = _layers_are_equal(rows)
        self._num_layers = 1 + max(row_layer(row) or 0 for row in rows)
        self._num_experts = 1 + max(row_expert(row) or 0 for row in rows)
        self._common = ArchivePlan(self._common_state(iteration))
        self._optimizer = optimizer
        self._extra = ArchivePlan([None])
        self._chunks: dict[str, list[_Chunk]] = {}
        self._entries: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._aliases: dict[str, list[str]] = {}
        self._sizes: dict[str, int] = {}
        for row in rows:
            self._plan(row, dtypes[row.megatron])
        self._objects = list(self._extra_states(rows))
        self._outputs: dict[str, OutputFile] = {}
        self._exit = ExitStack()
        self._directory = Path()

    @property
    def nbytes(self) -> int:
        carried = sum(info.length for _, info in self._optimizer_parts())
        return sum(self._sizes.values()) + self._common.size + self._extra.size + carried

    def open(self, directory: Path) -> None:
        self._directory = directory
        first = min(self._sizes)
        self._sizes[first] += self._extra.size
        for name, size in self._sizes.items():
            self._outputs[name] = self._exit.enter_context(OutputFile(directory / name, size))
        self._extra_place = (first, self._sizes[first] - self._extra.size)
        for chunks in self._chunks.values():
            for chunk in chunks:
                placed = chunk.plan.place(self._outputs[chunk.file], chunk.position)
                chunk.slot = placed[chunk.tensor]

    def write(self, row: ParamRow, value: RowValue) -> None:
        chunks, merged = self._chunks[row.megatron], value.merged()
        if isinstance(row.layout, Vocab):
            self.write_rows(row, merged, 0)
            return
        parts = merged.chunk(len(chunks), dim=int(isinstance(row.layout, RowParallel)))
        for chunk, part in zip(chunks, parts, strict=True):
            chunk.append(part)

    def write_rows(self, row: ParamRow, tensor: Tensor, start: int) -> None:
        shards = [[chunk.append] for chunk in self._chunks[row.megatron]]
        append_vocab_rows(row, tensor, start, shards, self._layout)

    def finish(self) -> None:
        for chunks in self._chunks.values():
            for chunk in chunks:
                chunk.plan.finish(self._outputs[chunk.file], chunk.position)
        name, position = self._extra_place
        self._extra.place(self._outputs[name], position)
        self._extra.finish(self._outputs[name], position)
        self._write_common()
        self._write_metadata()
        write_model_files(self._directory / FILES_DIR, self._config, self._files)
        for output in self._outputs.values():
            output.sync()
        sync_directory(self._directory)

    def close(self) -> None:
        self._exit.close()

    def _optimizer_parts(self) -> list[tuple[MetadataIndex, _StorageInfo]]:
        """Chunks and objects of the optimizer's state in its source."""
        if self._optimizer is None:
            return []
        keys = set(self._optimizer.optimizer_keys())
        storage = self._optimizer.metadata.storage_data
        return [(index, info) for index, info in storage.items() if index.fqn in keys]

    def _copy_optimizer(self) -> dict[MetadataIndex, _StorageInfo]:
        """Copy the bytes of the optimizer's state; returns where they lie now."""
        parts = self._optimizer_parts()
        placed: dict[MetadataIndex, _StorageInfo] = {}
        if self._optimizer is None or not parts:
            return placed
        position = 0
        with OutputFile(
            self._directory / _OPTIMIZER_FILE, sum(info.length for _, info in parts)
        ) as output:
            for index, info in parts:
                placed[index] = _StorageInfo(_OPTIMIZER_FILE, position, info.length)
                path = self._optimizer.directory / info.relative_path
                stored = StoredTensor(path, info.offset, torch.uint8, (info.length,))
                for start in range(0, info.length, SLICE_BYTES):
                    piece = stored.read(start, start + SLICE_BYTES)
                    output.write(piece.numpy().tobytes(), position + start)
                position += info.length
            output.sync()
        return placed

    def _write_common(self) -> None:
        path = self._directory / "common.pt"
        if self._optimizer is not None:
            self._optimizer.write_common(path)
            return
        with OutputFile(path, self._common.size) as common:
            self._common.finish(common, 0)
            common.sync()

    def _common_state(self, iteration: int | None) -> dict[str, Any]:
        # Without Megatron-LM's `args`: Megatron-Core alone refuses a file with an object in it.
        return {
            "checkpoint_version": 3.0,
            "iteration": iteration or 0,
            # What Megatron-LM asks of a checkpoint before it builds the state to load.
            "content_metadata": {
                "singleton_local_shards": False,
                "non_homogeneous_layers": not self._stack_layers,
            },
        }

    def _plan(self, row: ParamRow, dtype: torch.dtype) -> None:
        layer, expert = row_layer(row), row_expert(row)
        key, *aliases = dict.fromkeys(dist_names(row))
        lead: list[tuple[int, int]] = []
        if layer is not None and self._stack_layers:
            key = rename_layer(key, "")
            aliases = [rename_layer(alias, "") for alias in aliases]
            lead.append((layer, self._num_layers))
        if expert is not None:
            lead.append((expert, self._num_experts))
        index, depths = [i for i, _ in lead], [n for _, n in lead]
        shape = list(global_shape(row))
        if isinstance(row.layout, Vocab):
            shape[0] = self._layout.padded_vocab(shape[0])
        self._entries[key] = (dtype, (*depths, *shape))
        # Layer implementations name norms differently; every name leads to the same bytes.
        self._aliases[key] = aliases
        num_chunks = self._layout.num_shards(row) * (1 + isinstance(row.layout, GateUp))
        axis = int(isinstance(row.layout, RowParallel))
        sizes = list(shape)
        if not isinstance(row.layout, Replicated):
            sizes[axis] //= num_chunks
        chunks = []
        for number in range(num_chunks):
            offsets = [0] * len(shape)
            offsets[axis] = number * sizes[axis]
            chunk = _Chunk(key, (*index, *offsets), (*[1] * len(lead), *sizes), dtype)
            chunk.file = self._file_of(row, number)
            chunk.position = self._sizes.get(chunk.file, 0)
            self._sizes[chunk.file] = chunk.position + chunk.plan.size
            chunks.append(chunk)
        self._chunks[row.megatron] = chunks

    def _file_of(self, row: ParamRow, number: int) -> str:
        """The file of the rank that would write the chunk."""
        layer = row_layer(row)
        if layer is not None:
            chunk, _ = self._layout.chunk_of_layer(layer)
        else:
            chunk = 0 if row.megatron.startswith("embedding.") else self._layout.last_chunk
        stage, _ = self._layout.stage_of_chunk(chunk)
        rank = stage * self._layout.tensor + number % self._layout.tensor
        return f"__{rank}_0.distcp"

    def _extra_states(self, rows: tuple[ParamRow, ...]) -> Iterator[str]:
        """Keys of the objects that modules of Transformer Engine may have.

        `<module>._extra_state/shard_<indices>_<sizes>`, as ShardedObject.unique_key makes them.
        """
        for row in rows:
            layer, expert = row_layer(row), row_expert(row)
            modules = {name.rpartition(".")[0] for name in dist_names(row)}
            if ".self_attention.linear_proj." in row.megatron:
                modules.add(f"decoder.layers.{layer}.self_attention.core_attention")
            lead: list[tuple[int, int]] = []
            if layer is not None and self._stack_layers:
                modules = {rename_layer(module + ".", "").rstrip(".") for module in modules}
                lead.append((layer, self._num_layers))
            if expert is not None:
                lead.append((expert, self._num_experts))
            lead = lead or [(0, 1)]
            indices = ".".join(str(i) for i, _ in lead)
            sizes = ".".join(str(n) for _, n in lead)
            for module in sorted(modules):
                yield f"{module}._extra_state/shard_{indices}_{sizes}"

    def _write_metadata(self) -> None:
        tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        storage: dict[MetadataIndex, _StorageInfo] = {}
        for chunk in (chunk for chunks in self._chunks.values() for chunk in chunks):
            dtype, shape = self._entries[chunk.key]
            place = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
            for key in (chunk.key, *self._aliases[chunk.key]):
                empty = TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), [])
                entry = tensors.setdefault(key, empty)
                assert isinstance(entry, TensorStorageMetadata)
                index = MetadataIndex(key, place.offsets, len(entry.chunks))
                entry.chunks.append(place)
                storage[index] = _StorageInfo(chunk.file, chunk.position, chunk.plan.size)
        name, position = self._extra_place
        for key in self._objects:
            tensors[key] = BytesStorageMetadata()
            storage[MetadataIndex(key)] = _StorageInfo(name, position, self._extra.size)
        placed = self._copy_optimizer()
        storage |= placed
        if self._optimizer is not None:
            known = self._optimizer.metadata.state_dict_metadata
            tensors |= {index.fqn: known[index.fqn] for index in placed}
        metadata = Metadata(
            state_dict_metadata=tensors,
            planner_data=None,
            storage_data=storage,
            storage_meta=StorageMeta(),
        )
        # Absent from the class of older versions of torch.
        if hasattr(metadata, "version"):
            metadata.version = _METADATA_VERSION
        (self._directory / ".metadata").write_bytes(pickle.dumps(metadata))
        (self._directory / "metadata.json").write_text(json.dumps(_FORMAT), encoding="utf-8")


def append_vocab_rows(
    row: ParamRow,
    tensor: Tensor,
    start: int,
    shards: Sequence[Sequence[Callable[[Tensor], None]]],
    layout: TargetLayout,
) -> None:
    """Append rows of a vocabulary, counted from `start`, to the shards that hold them.

    Args:
        row: the vocabulary's.
        tensor: the rows.
        start: index of the first.
        shards: for every tensor rank the functions that take its next rows.
        layout: says how many rows a rank holds; zeros fill them up after the last row.
    """
    vocab_size = global_shape(row)[0]
    per_rank = layout.padded_vocab(vocab_size) // layout.tensor
    stop = start + len(tensor)
    for rank, appends in enumerate(shards):
        low, high = rank * per_rank, (rank + 1) * per_rank
        piece = tensor[max(low - start, 0) : max(high - start, 0)]
        padding = 0
        if stop == vocab_size:
            padding = high - max(low, min(vocab_size, high))
        for append in appends:
            if len(piece):
                append(piece)
            if padding:
                append(tensor.new_zeros(padding, *tensor.shape[1:]))


def write_model_files(directory: Path, config: Mapping[str, Any], files: Path | None) -> None:
    """The model's config.json and tokenizer files, carried beside a Megatron checkpoint."""
    directory.mkdir()
    if files is not None:
        carry_files(files, directory)
    content = {name: value for name, value in config.items() if name != "quantization_config"}
    (directory / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _layers_are_equal(rows: tuple[ParamRow, ...]) -> bool:
    shapes: dict[int, dict[str, tuple[int, ...]]] = {}
    for row in rows:
        layer = row_layer(row)
        if layer is not None:
            shapes.setdefault(layer, {})[rename_layer(row.megatron, "")] = global_shape(row)
    return all(layer == shapes[0] for layer in shapes.values())
