"""Where a Megatron layout puts each row of the table: the one description that both sides use."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_p3o.architecture import ModelArchitecture
from megatron_p3o.errors import ConfigurationError
from megatron_p3o.weights.families import ParamRow
from megatron_p3o.weights.layouts import ColumnParallel, GateUp, Qkv, Replicated, RowParallel, Vocab

_LAYER = re.compile(r"^(decoder|mtp)\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetLayout:
    """The sizes of a Megatron checkpoint that is written."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    """None: as `tensor`, Megatron's default."""
    chunk_layers: tuple[int, ...] | None = None
    """Layers of each pipeline x virtual_pipeline chunk in the model's order; None: equal ones."""
    vocab_divisible_by: int = 128
    """Megatron's make-vocab-size-divisible-by; the vocabulary is padded to it times `tensor`."""

    def resolved(self, architecture: ModelArchitecture) -> "TargetLayout":
        """With every size filled in, checked against the model.

        Raises:
            ConfigurationError: a size does not divide what it splits.
        """
        for flag, size in self._flags().items():
            if size < 1:
                raise ConfigurationError(f"{flag}={size} must be >= 1; use 1 to turn it off")
        expert_tensor = self.tensor if self.expert_tensor is None else self.expert_tensor
        layout = replace(
            self,
            expert_tensor=expert_tensor,
            chunk_layers=self.chunk_layers or self._equal_chunks(architecture),
        )
        layout._check_chunks(architecture)
        layout._check_experts(architecture)
        if self.tensor % expert_tensor:
            raise ConfigurationError(
                f"--etp={expert_tensor} must divide --tp={self.tensor}: the files of a checkpoint "
                "are named by the tensor rank; use a divisor"
            )
        return layout

    def _check_experts(self, architecture: ModelArchitecture) -> None:
        moe = architecture.moe
        if moe is None and self.expert != 1:
            raise ConfigurationError(
                f"--ep={self.expert} shares experts, but the model has none; leave it out"
            )
        if moe is not None and moe.num_experts % self.expert:
            raise ConfigurationError(
                f"--ep={self.expert} must divide the model's num_experts={moe.num_experts}; use a "
                "divisor"
            )

    def _flags(self) -> dict[str, int]:
        return {
            "--tp": self.tensor,
            "--pp": self.pipeline,
            "--vpp": self.virtual_pipeline,
            "--ep": self.expert,
            "--etp": 1 if self.expert_tensor is None else self.expert_tensor,
            "--vocab-divisible-by": self.vocab_divisible_by,
        }

    def _equal_chunks(self, architecture: ModelArchitecture) -> tuple[int, ...]:
        num_chunks = self.pipeline * self.virtual_pipeline
        if architecture.num_layers % num_chunks:
            raise ConfigurationError(
                f"--pp={self.pipeline} x --vpp={self.virtual_pipeline} must divide the model's "
                f"num_layers={architecture.num_layers}; use sizes that do, or name the layers of "
                "each chunk with --chunk-layers"
            )
        return (architecture.num_layers // num_chunks,) * num_chunks

    def _check_chunks(self, architecture: ModelArchitecture) -> None:
        chunks = self.chunk_layers or ()
        num_chunks = self.pipeline * self.virtual_pipeline
        given = ",".join(map(str, chunks))
        if len(chunks) != num_chunks or min(chunks, default=0) < 0:
            raise ConfigurationError(
                f"--chunk-layers={given} must hold --pp x --vpp = {num_chunks} numbers >= 0, in "
                "the order of the model; give one for each"
            )
        if sum(chunks) != architecture.num_layers:
            raise ConfigurationError(
                f"--chunk-layers={given} must sum to the model's num_layers="
                f"{architecture.num_layers}, not {sum(chunks)}; mend it"
            )

    def check_rows(self, rows: tuple[ParamRow, ...]) -> None:
        """Check that every row can be cut.

        Raises:
            ConfigurationError: a size does not divide the tensors it splits.
        """
        for row in rows:
            is_expert = row_expert(row) is not None
            flag, size = ("--etp", self.expert_tensor) if is_expert else ("--tp", self.tensor)
            assert size is not None
            if _can_cut(row, size):
                continue
            legal = [n for n in range(1, 2 * size) if _can_cut(row, n)]
            nearest = min(legal, key=lambda n: abs(n - size))
            raise ConfigurationError(
                f"{flag}={size} cannot cut {row.megatron} ({_rule(row)}); the nearest legal value "
                f"is {nearest}"
            )

    def chunk_of_layer(self, layer: int) -> tuple[int, int]:
        """(chunk in model order, index of the layer in it)."""
        for chunk, count in enumerate(self.chunk_layers or ()):
            if layer < count:
                return chunk, layer
            layer -= count
        raise AssertionError("layers are counted in resolved()")

    @property
    def last_chunk(self) -> int:
        return self.pipeline * self.virtual_pipeline - 1

    def stage_of_chunk(self, chunk: int) -> tuple[int, int]:
        """(pipeline rank, virtual stage): chunks are dealt round-robin."""
        virtual, stage = divmod(chunk, self.pipeline)
        return stage, virtual

    def padded_vocab(self, vocab_size: int) -> int:
        multiple = self.vocab_divisible_by * self.tensor
        return math.ceil(vocab_size / multiple) * multiple

    def num_shards(self, row: ParamRow) -> int:
        """Ranks that share one tensor of the row."""
        size = self.tensor if row_expert(row) is None else self.expert_tensor
        assert size is not None
        return 1 if isinstance(row.layout, Replicated) else size


def row_layer(row: ParamRow) -> int | None:
    """The decoder layer that a row belongs to."""
    match = _LAYER.match(row.megatron)
    return int(match[2]) if match and match[1] == "decoder" else None


def row_expert(row: ParamRow) -> int | None:
    """The expert that a row belongs to, counted over all expert ranks."""
    match = _EXPERT.search(row.megatron)
    return int(match[1]) if match else None


def rename_layer(name: str, layer: int | str) -> str:
    """The name with another layer index; an empty one leaves the index out."""
    middle = f"{layer}." if layer != "" else ""
    return _LAYER.sub(lambda match: f"{match[1]}.layers.{middle}", name)


def global_shape(row: ParamRow) -> tuple[int, ...]:
    """Shape of the row's global Megatron tensor, without padding."""
    shapes = list(row.hf.values())
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def shard_shape(row: ParamRow, layout: TargetLayout) -> tuple[int, ...]:
    """What one rank holds of the row."""
    shape, size = global_shape(row), layout.num_shards(row)
    if isinstance(row.layout, Vocab):
        return (layout.padded_vocab(shape[0]) // size, *shape[1:])
    if isinstance(row.layout, RowParallel):
        return (shape[0], shape[1] // size)
    return (shape[0] // size, *shape[1:])


def by_name(rows: tuple[ParamRow, ...]) -> Mapping[str, ParamRow]:
    return {row.megatron: row for row in rows}


def _can_cut(row: ParamRow, size: int) -> bool:
    layout = row.layout
    if isinstance(layout, Qkv):
        heads, groups = layout.num_heads, layout.num_kv_heads
        # Fewer groups than ranks are cut by plain rows, as Megatron's SelfAttention expects.
        return heads % size == 0 and (groups % size == 0 or size % groups == 0)
    if isinstance(layout, ColumnParallel):
        return layout.num_units % size == 0
    if isinstance(layout, GateUp):
        return global_shape(row)[0] // 2 % size == 0
    if isinstance(layout, RowParallel):
        return global_shape(row)[1] % size == 0
    return True


def _rule(row: ParamRow) -> str:
    layout = row.layout
    if isinstance(layout, Qkv):
        return (
            f"it must divide num_attention_heads={layout.num_heads}, and divide "
            f"num_key_value_heads={layout.num_kv_heads} or be a multiple of it"
        )
    if isinstance(layout, ColumnParallel):
        return f"it must divide its {layout.num_units} heads or channels"
    if isinstance(layout, GateUp):
        return f"it must divide its {global_shape(row)[0] // 2} channels"
    return f"it must divide its {global_shape(row)[1]} channels"
