"""Weights into a rank's parameters and out again by Hugging Face name, one row at a time.

Both directions read the same table (`megatron_p3o.weights.families`):

    in:   read the row's tensors -> merge -> shard -> copy into this rank's parameter
    out:  gather the parameter's shards -> unshard -> split -> yield by name

So no more than one row's global tensor exists beside the model.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_p3o.architecture import ModelArchitecture
from megatron_p3o.errors import InputError
from megatron_p3o.weights.families import param_rows, rows_by_megatron_name
from megatron_p3o.weights.hf_io import HfReader

# Old Llama checkpoints store this buffer, which follows from config.json.
_DERIVED_SUFFIX = ".rotary_emb.inv_freq"


class TensorShard(NamedTuple):
    """A rank's place in the group that shares each tensor."""

    rank: int
    size: int


def load_hf_weights(
    reader: HfReader,
    architecture: ModelArchitecture,
    targets: Mapping[str, Tensor],
    *,
    dense: TensorShard,
    expert: TensorShard,
) -> None:
    """Fill this rank's parameters; only the tensors they need are read.

    Args:
        reader: the model directory's tensors.
        architecture: of the same directory.
        targets: this rank's parameters by global Megatron name, in the spelling of either layer
            implementation; any dtype and device.
        dense: this rank's part of every tensor outside the experts.
        expert: this rank's part of every expert's tensors.

    Raises:
        InputError: a tensor is missing, has another shape, or has no place in the model.
        ValueError: a target has no row in the family's table.
    """
    _check_names(reader, architecture)
    rows = rows_by_megatron_name(architecture)
    names_by_row: dict[str, list[str]] = defaultdict(list)
    for name in targets:
        if name not in rows:
            raise ValueError(f"parameter {name} has no row in the {architecture.family} table")
        names_by_row[rows[name].megatron].append(name)
    for row_name, names in names_by_row.items():
        row = rows[row_name]
        merged = row.layout.merge([reader.get(name, shape=row.hf[name]) for name in row.hf])
        part = expert if row.expert else dense
        shard = row.layout.shard(merged, part.rank, part.size)
        for name in names:
            assert targets[name].shape == shard.shape, (name, targets[name].shape, shard.shape)
            with torch.no_grad():
                targets[name].copy_(shard)


def hf_tensors(
    architecture: ModelArchitecture, gather: Callable[[str], Sequence[Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """The whole model by Hugging Face name, in the order of a checkpoint.

    Args:
        architecture: of the model.
        gather: gives the shards of a parameter in rank order, asked for by `ParamRow`'s
            `megatron` name. Called once per row, in the same order on every rank, so it may be
            collective.

    Yields:
        (name, tensor). Tensors may be views of what `gather` returned: use or copy each before the
        parameters change. With tied embeddings there is no `lm_head.weight`.
    """
    for row in param_rows(architecture):
        merged = row.layout.unshard(gather(row.megatron))
        yield from zip(row.hf, row.layout.split(merged), strict=True)


def _check_names(reader: HfReader, architecture: ModelArchitecture) -> None:
    """Refuse tensors that the model would silently leave out."""
    known = {name for row in param_rows(architecture) for name in row.hf}
    for name in reader.names():
        if name in known or name.endswith(_DERIVED_SUFFIX):
            continue
        if name == "lm_head.weight" and architecture.tie_word_embeddings:
            _check_tied_head(reader, architecture)
            continue
        raise InputError(
            f"model.path={str(reader.model_dir)!r}: the weights hold {name}, which has no place in "
            f"a {architecture.family} model of this config.json; use the config.json that belongs "
            "to the weights"
        )


def _check_tied_head(reader: HfReader, architecture: ModelArchitecture) -> None:
    """A stored head is redundant only if it equals the embedding."""
    shape = (architecture.vocab_size, architecture.hidden_size)
    head = reader.get("lm_head.weight", shape=shape)
    if not torch.equal(head, reader.get("model.embed_tokens.weight", shape=shape)):
        raise InputError(
            f"model.path={str(reader.model_dir)!r}: lm_head.weight differs from "
            "model.embed_tokens.weight although config.json says tie_word_embeddings=true; set it "
            "to false, or remove lm_head.weight"
        )
