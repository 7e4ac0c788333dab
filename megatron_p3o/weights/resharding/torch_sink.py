"""Megatron's legacy `torch` checkpoints as a sink; see `torch_files` for their names."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_p3o.weights.families import ParamRow
from megatron_p3o.weights.layouts import Vocab
from megatron_p3o.weights.resharding.archives import ArchivePlan, PlannedTensor
from megatron_p3o.weights.resharding.dist_sink import append_vocab_rows, write_model_files
from megatron_p3o.weights.resharding.files import OutputFile, TensorSlot, sync_directory
from megatron_p3o.weights.resharding.model_config import FILES_DIR
from megatron_p3o.weights.resharding.target import (
    TargetLayout,
    row_expert,
    row_layer,
    shard_shape,
)
from megatron_p3o.weights.resharding.torch_files import (
    EMBEDDING,
    FILE_NAMES,
    OUTPUT,
    TRACKER,
    FileRank,
    directory_name,
    file_ranks,
    local_names,
)
from megatron_p3o.weights.resharding.values import RowValue


class TorchSink:
    """A directory that Megatron-LM loads with `--ckpt-format torch` and the same layout."""

    def __init__(
        self,
        dtypes: Mapping[str, torch.dtype],
        rows: tuple[ParamRow, ...],
        layout: TargetLayout,
        *,
        config: Mapping[str, Any],
        files: Path | None,
        arguments: Namespace,
        iteration: int | None,
        transformer_engine: bool,
    ) -> None:
        """
        Args:
            dtypes: of every row by its Megatron name.
            rows: the model's table.
            layout: resolved.
            config: the model's config.json, carried along.
            files: where tokenizer and generation files are copied from.
            arguments: Megatron-LM's `args`.
            iteration: of the source; without one the checkpoint is a "release".
            transformer_engine: whether parameters have the names of Transformer Engine's layers,
                or those of Megatron's local ones.
        """
        self._layout = layout
        self._config = config
        self._files = files
        self._iteration = iteration if iteration else None
        self._spelling = 0 if transformer_engine else -1
        self._num_experts = 1 + max(row_expert(row) or 0 for row in rows)
        self._is_tied = all(row.megatron != OUTPUT for row in rows)
        self._has_mtp = any(row.megatron.startswith("mtp.") for row in rows)
        # For every row, every shard of it in every file that holds the shard.
        self._planned: dict[str, list[list[PlannedTensor]]] = {}
        models: dict[FileRank, list[dict[str, PlannedTensor]]] = {
            rank: [{} for _ in range(layout.virtual_pipeline)] for rank in file_ranks(layout)
        }
        for row in rows:
            self._plan(row, dtypes[row.megatron], models)
        self._archives = {
            rank: ArchivePlan(self._state(chunks, arguments)) for rank, chunks in models.items()
        }
        self._outputs: dict[FileRank, OutputFile] = {}
        self._slots: dict[PlannedTensor, TensorSlot] = {}
        self._exit = ExitStack()
        self._directory = Path()

    @property
    def nbytes(self) -> int:
        return sum(archive.size for archive in self._archives.values())

    @property
    def _name(self) -> str:
        return "release" if self._iteration is None else f"iter_{self._iteration:07}"

    def open(self, directory: Path) -> None:
        self._directory = directory
        for rank, archive in self._archives.items():
            path = directory / self._name / directory_name(rank, self._layout) / FILE_NAMES[0]
            output = self._exit.enter_context(OutputFile(path, archive.size))
            self._outputs[rank] = output
            self._slots |= archive.place(output, 0)

    def write(self, row: ParamRow, value: RowValue) -> None:
        merged = value.merged()
        if isinstance(row.layout, Vocab):
            self.write_rows(row, merged, 0)
            return
        shards = self._planned[row.megatron]
        for index, copies in enumerate(shards):
            shard = row.layout.shard(merged, index, len(shards)).contiguous()
            for planned in copies:
                self._slots[planned].append(shard)

    def write_rows(self, row: ParamRow, tensor: Tensor, start: int) -> None:
        shards: list[list[Callable[[Tensor], None]]] = [
            [self._slots[planned].append for planned in copies]
            for copies in self._planned[row.megatron]
        ]
        append_vocab_rows(row, tensor, start, shards, self._layout)

    def finish(self) -> None:
        for rank, archive in self._archives.items():
            archive.finish(self._outputs[rank], 0)
            self._outputs[rank].sync()
        name = "release" if self._iteration is None else str(self._iteration)
        (self._directory / TRACKER).write_text(name, encoding="utf-8")
        write_model_files(self._directory / FILES_DIR, self._config, self._files)
        sync_directory(self._directory)

    def close(self) -> None:
        self._exit.close()

    def _state(
        self, chunks: list[dict[str, PlannedTensor]], arguments: Namespace
    ) -> dict[str, Any]:
        models: dict[str, Any] = {f"model{index}": chunk for index, chunk in enumerate(chunks)}
        if len(chunks) == 1:
            models = {"model": chunks[0]}
        return {
            "args": arguments,
            "checkpoint_version": 3.0,
            "iteration": self._iteration or 0,
            **models,
        }

    def _plan(
        self,
        row: ParamRow,
        dtype: torch.dtype,
        models: Mapping[FileRank, list[dict[str, PlannedTensor]]],
    ) -> None:
        layer, expert = row_layer(row), row_expert(row)
        chunk, index = (0, None) if row.megatron == EMBEDDING else (self._layout.last_chunk, None)
        if layer is not None:
            chunk, index = self._layout.chunk_of_layer(layer)
        per_rank = self._num_experts // self._layout.expert
        first_expert = 0 if expert is None else expert // per_rank * per_rank
        name = list(local_names(row, index, first_expert))[self._spelling]
        places = [(chunk, name)]
        if row.megatron == EMBEDDING and self._layout.last_chunk > 0:
            # The last stage has a copy of its own: to embed further tokens, or for logits.
            if self._has_mtp:
                places.append((self._layout.last_chunk, EMBEDDING))
            elif self._is_tied:
                places.append((self._layout.last_chunk, OUTPUT))
        size, shape = self._layout.num_shards(row), shard_shape(row, self._layout)
        shards: list[list[PlannedTensor]] = [[] for _ in range(size)]
        for place, local in places:
            stage, virtual = self._layout.stage_of_chunk(place)
            for rank, chunks in models.items():
                if rank.pipeline != stage:
                    continue
                if expert is not None and rank.expert != expert // per_rank:
                    continue
                planned = PlannedTensor(shape, dtype)
                chunks[virtual][local] = planned
                shards[rank.tensor % size].append(planned)
        self._planned[row.megatron] = shards
