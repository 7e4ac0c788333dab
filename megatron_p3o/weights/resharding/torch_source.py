"""Megatron's legacy `torch` checkpoints as a source; see `torch_files` for their names."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_p3o.errors import InputError
from megatron_p3o.weights.families import ParamRow, param_rows
from megatron_p3o.weights.layouts import Vocab
from megatron_p3o.weights.resharding.describe import describe_model
from megatron_p3o.weights.resharding.files import StoredTensor, num_bytes, num_elements
from megatron_p3o.weights.resharding.model_config import find_config
from megatron_p3o.weights.resharding.pickles import load_archive
from megatron_p3o.weights.resharding.target import (
    TargetLayout,
    global_shape,
    row_expert,
    row_layer,
    shard_shape,
)
from megatron_p3o.weights.resharding.torch_files import (
    DIRECTORY,
    EMBEDDING,
    FILE_NAMES,
    OUTPUT,
    FileRank,
    local_names,
)
from megatron_p3o.weights.resharding.values import RowValue, same_bits

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(?:local_experts\.(\d+)\.|linear_fc[12]\.weight(\d+)$)")
_GROUPED = re.compile(r"\.experts\.weight([12])$")
_BESIDE_WEIGHTS = re.compile(r"(^|\.)(_extra_state|rotary_pos_emb\.inv_freq)$")

_Chunk = dict[str, StoredTensor]


class _Shards(NamedTuple):
    """A row's tensors, one for each rank that shares it."""

    tensors: list[StoredTensor]
    names: list[str]


class TorchSource:
    """A directory of `mp_rank_*` directories."""

    format = "torch"

    def __init__(self, directory: Path, *, config_dir: Path | None, unsafe: bool) -> None:
        """
        Args:
            directory: `iter_*` or `release`.
            config_dir: a Hugging Face directory with the model's config.json, where the
                checkpoint does not lead to one.
            unsafe: allow any object in its pickles.

        Raises:
            InputError: it is incomplete, damaged, or not what the configuration calls for.
        """
        self.directory = directory
        self.notes: list[str] = []
        contents = _load_files(directory, unsafe=unsafe)
        arguments = next(iter(contents.values())).get("args")
        self.config, self.files = find_config(directory, config_dir, arguments)
        architecture = describe_model(self.config, f"configuration of {str(directory)!r}")
        iteration = next(iter(contents.values())).get("iteration")
        self.iteration: int | None = iteration if isinstance(iteration, int) else None
        num_experts = architecture.moe.num_experts if architecture.moe is not None else 1
        num_local_experts = num_experts // (1 + max(rank.expert for rank in contents))
        self._chunks = {
            rank: self._model_chunks(rank, content, architecture.hidden_size, num_local_experts)
            for rank, content in contents.items()
        }
        names = {n for chunks in self._chunks.values() for chunk in chunks for n in chunk}
        if not any(name.startswith("mtp.") for name in names):
            architecture = replace(architecture, num_mtp_layers=0)
        self.architecture = architecture
        self.rows = param_rows(architecture)
        if any("optimizer" in content for content in contents.values()):
            self.notes.append("the optimizer's state is left behind")
        self._layout = self._find_layout()
        self.layout = _describe(self._layout)
        self._used: set[tuple[FileRank, int, str]] = set()
        self._shards = {row.megatron: self._find(row) for row in self.rows}
        self._check_leftovers()

    def dtype(self, row: ParamRow) -> torch.dtype:
        return self._shards[row.megatron].tensors[0].dtype

    def read(self, row: ParamRow) -> RowValue:
        shards = [stored.read() for stored in self._shards[row.megatron].tensors]
        merged = shards[0] if len(shards) == 1 else row.layout.unshard(shards)
        return RowValue(row, merged=merged[: global_shape(row)[0]])

    def read_rows(self, row: ParamRow, start: int, stop: int) -> Tensor:
        pieces = []
        low = 0
        for stored in self._shards[row.megatron].tensors:
            high = low + stored.shape[0]
            if max(start, low) < min(stop, high):
                pieces.append(stored.read(max(start, low) - low, min(stop, high) - low))
            low = high
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def describe(self) -> list[tuple[str, str, tuple[int, ...], torch.dtype]]:
        return [
            (row.megatron, name, stored.shape, stored.dtype)
            for row in self.rows
            for stored, name in zip(*self._shards[row.megatron], strict=True)
        ]

    def _error(self, problem: str) -> InputError:
        return InputError(f"{str(self.directory)!r}: {problem}")

    def _model_chunks(
        self, rank: FileRank, content: Mapping[str, Any], hidden_size: int, num_local_experts: int
    ) -> list[_Chunk]:
        names = ["model"] if "model" in content else []
        names += sorted(
            (key for key in content if re.fullmatch(r"model\d+", str(key))),
            key=lambda key: int(key[5:]),
        )
        chunks = []
        for name in names:
            model = content[name]
            if not isinstance(model, dict) or "language_model" in model:
                raise self._error(
                    f"{name} is not a state dict of Megatron-Core; convert the checkpoint to "
                    "Megatron-Core with the Megatron-LM that wrote it"
                )
            tensors = {k: v for k, v in model.items() if isinstance(v, StoredTensor)}
            chunks.append(_split_grouped(tensors, hidden_size, num_local_experts))
        if not chunks:
            raise self._error(f"the file of {rank} holds no model; copy it again")
        return chunks

    def _find_layout(self) -> TargetLayout:
        """From which files there are, and which layers and experts are in them."""
        ranks = sorted(self._chunks)
        num_stages = ranks[-1].pipeline + 1
        num_virtual = len(self._chunks[ranks[0]])
        layers = []
        for virtual in range(num_virtual):
            for stage in range(num_stages):
                rank = next(rank for rank in ranks if rank.pipeline == stage)
                layers.append(_count(_LAYER, self._chunks[rank][virtual]))
        if sum(layers) != self.architecture.num_layers:
            raise self._error(
                f"its files hold {sum(layers)} layers, the configuration has "
                f"{self.architecture.num_layers}; copy the missing files, or use the config.json "
                "that belongs to the weights (--config)"
            )
        num_tensor = max(rank.tensor for rank in ranks) + 1
        num_expert = max(rank.expert for rank in ranks) + 1
        return TargetLayout(
            tensor=num_tensor,
            pipeline=num_stages,
            virtual_pipeline=num_virtual,
            expert=num_expert,
            expert_tensor=self._find_expert_tensor(num_tensor),
            chunk_layers=tuple(layers),
            vocab_divisible_by=1,
        )

    def _find_expert_tensor(self, num_tensor: int) -> int:
        """Ranks that share one expert: from the share of its rows that a file holds."""
        row = next((row for row in self.rows if row_expert(row) is not None), None)
        if row is None:
            return num_tensor
        full = global_shape(row)
        for chunks in self._chunks.values():
            for chunk in chunks:
                for name, stored in chunk.items():
                    if _EXPERT.search(name) and "linear_fc1" in name and stored.shape[0]:
                        return full[0] // stored.shape[0]
        raise self._error("its files hold no experts, the configuration has them")

    def _find(self, row: ParamRow) -> _Shards:
        layer, expert = row_layer(row), row_expert(row)
        chunk, index = self._place(row, layer)
        stage, virtual = self._layout.stage_of_chunk(chunk)
        ranks = [rank for rank in sorted(self._chunks) if rank.pipeline == stage]
        first_expert, size = 0, self._layout.num_shards(row)
        if expert is not None:
            per_rank = self._experts_per_rank()
            first_expert = expert // per_rank * per_rank
            ranks = [rank for rank in ranks if rank.expert == expert // per_rank]
        names = list(local_names(row, index, first_expert))
        by_shard: dict[int, tuple[StoredTensor, str]] = {}
        for rank in ranks:
            for name in names:
                stored = self._chunks[rank][virtual].get(name)
                if stored is not None:
                    self._used.add((rank, virtual, name))
                    # Expert ranks hold copies of dense tensors, and norms are on every rank.
                    by_shard.setdefault(rank.tensor % size, (stored, name))
        if sorted(by_shard) != list(range(size)):
            raise self._error(
                f"its files of pipeline rank {stage} hold {len(by_shard)} of {size} shards of "
                f"{names[-1]} ({row.megatron}); copy the missing files, or use the config.json "
                "that belongs to the weights (--config)"
            )
        found = [by_shard[shard] for shard in range(size)]
        shards = _Shards([stored for stored, _ in found], [name for _, name in found])
        self._check_shapes(row, shards)
        return shards

    def _place(self, row: ParamRow, layer: int | None) -> tuple[int, int | None]:
        """(model chunk, index of the layer in it)."""
        if layer is not None:
            return self._layout.chunk_of_layer(layer)
        return (0 if row.megatron == EMBEDDING else self._layout.last_chunk), None

    def _experts_per_rank(self) -> int:
        counts = {
            _count(_EXPERT, chunk)
            for chunks in self._chunks.values()
            for chunk in chunks
            if any(_EXPERT.search(name) for name in chunk)
        }
        if len(counts) != 1:
            raise self._error(f"its files hold different numbers of experts: {sorted(counts)}")
        return counts.pop()

    def _check_shapes(self, row: ParamRow, shards: _Shards) -> None:
        shapes = {stored.shape for stored in shards.tensors}
        expected = shard_shape(row, self._layout)
        if isinstance(row.layout, Vocab):
            # Padded to a multiple that only whoever wrote the checkpoint knows.
            rows = sum(stored.shape[0] for stored in shards.tensors)
            fits = len(shapes) == 1 and rows >= global_shape(row)[0]
            fits = fits and {shape[1:] for shape in shapes} == {expected[1:]}
        else:
            fits = shapes == {expected}
        if not fits or len({stored.dtype for stored in shards.tensors}) != 1:
            found = ", ".join(str(list(stored.shape)) for stored in shards.tensors)
            raise self._error(
                f"{shards.names[0]} has shards of shapes {found}, the configuration calls for "
                f"{list(expected)}; use the config.json that belongs to the weights (--config)"
            )

    def _check_leftovers(self) -> None:
        for rank, chunks in sorted(self._chunks.items()):
            for virtual, chunk in enumerate(chunks):
                for name in chunk:
                    if (rank, virtual, name) in self._used or _BESIDE_WEIGHTS.search(name):
                        continue
                    is_tied = name == OUTPUT and self.architecture.tie_word_embeddings
                    if is_tied or (name == EMBEDDING and self.architecture.num_mtp_layers):
                        self._check_copy(name, rank, chunk[name])
                        continue
                    raise self._error(
                        f"the file of {rank} holds {name}, which has no place in a "
                        f"{self.architecture.family} model of its configuration; give the model's "
                        "own config.json with --config"
                    )

    def _check_copy(self, name: str, rank: FileRank, copy: StoredTensor) -> None:
        original = self._shards[EMBEDDING].tensors[rank.tensor]
        step = 4096
        is_same = original.shape == copy.shape and all(
            same_bits(original.read(start, start + step), copy.read(start, start + step))
            for start in range(0, original.shape[0], step)
        )
        if not is_same:
            raise self._error(
                f"{name} of {rank} differs from the first stage's embedding, of which the "
                "configuration makes it a copy; use the config.json that belongs to the weights "
                "(--config)"
            )


def _split_grouped(chunk: _Chunk, hidden_size: int, num_local_experts: int) -> _Chunk:
    """Grouped-GEMM experts as if each were stored alone.

    Megatron's GroupedMLP keeps `weight1` [hidden, experts * 2 ffn] and `weight2`
    [experts * ffn, hidden] whose memory is a run of experts, each transposed: [hidden, 2 ffn] and
    [ffn, hidden] (megatron/core/transformer/moe/experts.py).
    """
    split: _Chunk = {}
    for name, stored in chunk.items():
        match = _GROUPED.search(name)
        if match is None:
            split[name] = stored
            continue
        channels = num_elements(stored.shape) // hidden_size // num_local_experts
        shape = (channels, hidden_size) if match[1] == "1" else (hidden_size, channels)
        step = num_bytes(shape, stored.dtype)
        for expert in range(num_local_experts):
            local = f"{name[: match.start()]}.experts.local_experts.{expert}.linear_fc{match[1]}"
            split[f"{local}.weight"] = StoredTensor(
                stored.path, stored.offset + expert * step, stored.dtype, shape, (1, shape[0])
            )
    return split


def _load_files(directory: Path, *, unsafe: bool) -> dict[FileRank, dict[str, Any]]:
    found: dict[tuple[int, ...], Path] = {}
    for path in sorted(directory.iterdir()):
        match = DIRECTORY.match(path.name)
        if match:
            found[tuple(int(part) for part in match.groups() if part is not None)] = path
    if len({len(key) for key in found}) != 1:
        raise InputError(
            f"{str(directory)!r} holds mp_rank directories of several layouts; remove the others"
        )
    contents = {}
    for key, path in found.items():
        file = next((path / name for name in FILE_NAMES if (path / name).is_file()), None)
        if file is None:
            raise InputError(
                f"{str(path)!r} lacks {FILE_NAMES[0]}; copy the checkpoint again, whole"
            )
        content = load_archive(file, unsafe=unsafe)
        if not isinstance(content, dict):
            raise InputError(f"{str(file)!r} does not hold a dictionary; copy it again")
        contents[key] = content
    return {_rank(key, contents): content for key, content in contents.items()}


def _rank(key: tuple[int, ...], contents: Mapping[tuple[int, ...], Any]) -> FileRank:
    """Two numbers are tensor and pipeline rank, or tensor and expert rank."""
    tensor, *rest = key
    if len(rest) == 1:
        first_models = [
            content.get("model", content.get("model0", {}))
            for other, content in contents.items()
            if other[1] != 0
        ]
        # Only the first pipeline rank has the embedding; every expert rank has it.
        is_expert = any(EMBEDDING in model for model in first_models)
        return FileRank(0, rest[0], tensor) if is_expert else FileRank(rest[0], 0, tensor)
    stage, expert = rest or (0, 0)
    return FileRank(stage, expert, tensor)


def _count(pattern: re.Pattern[str], chunk: Mapping[str, Any]) -> int:
    """How many indices a pattern finds in names: layers of a chunk, experts of a rank."""
    found = (pattern.search(name) for name in chunk)
    indices = {next(group for group in match.groups() if group) for match in found if match}
    return len(indices)


def _describe(layout: TargetLayout) -> str:
    sizes = {
        "tp": layout.tensor,
        "pp": layout.pipeline,
        "vpp": layout.virtual_pipeline,
        "ep": layout.expert,
        "etp": layout.expert_tensor,
    }
    text = ", ".join(f"{name} {size}" for name, size in sizes.items())
    return f"{text}, layers {'+'.join(map(str, layout.chunk_layers or ()))}"
