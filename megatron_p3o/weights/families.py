"""Every parameter of one model: which Hugging Face tensors are in it, and how.

A table row names a Megatron parameter, the Hugging Face tensors it holds with their shapes, and
the layout that converts between them. Everything about a parameter is a column of its row: its
layout, whether it may be stored in FP8, and its name under Transformer Engine, which keeps the
norm in front of a linear layer as `layer_norm_weight` of that layer. `megatron_p3o.weights.tables`
has the rows of each family.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_p3o.architecture import ModelArchitecture
from megatron_p3o.weights.layouts import Layout
from megatron_p3o.weights.tables import (
    DECODER_PREFIX,
    EMBEDDING,
    FAMILY_TABLES,
    FINAL_NORM,
    MTP_PREFIX,
    MTP_ROWS,
    OUTPUT,
    Row,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamRow:
    """One Megatron parameter of one model, by its global name.

    Layers are counted over all stages, experts over all ranks.
    """

    megatron: str
    """Name in a model of Megatron's local layers."""
    te_name: str | None
    """Name in a model of Transformer Engine layers, where it differs."""
    hf: Mapping[str, tuple[int, ...]]
    """Hugging Face tensors by name, in the layout's order, with their shapes."""
    layout: Layout
    fp8: bool
    """Whether the weight may be stored in FP8: linear layers of the decoder only."""
    expert: bool = False
    """Whether it belongs to one expert, which the ranks of the expert axes share."""
    keep_dtype: bool = False
    """Whether it keeps its dtype whatever the other weights are converted to."""
    copies: tuple[str, ...] = ()
    """Hugging Face tensors that repeat the row's only one."""


def param_rows(architecture: ModelArchitecture) -> tuple[ParamRow, ...]:
    """Every parameter of the model, embedding first, then layer by layer.

    Tied embeddings have one row, the embedding's.
    """
    moe = architecture.moe
    mtp = range(architecture.num_layers, architecture.num_layers + architecture.num_mtp_layers)
    embeddings = tuple(f"model.layers.{layer}.embed_tokens.weight" for layer in mtp)
    heads = tuple(f"model.layers.{layer}.shared_head.head.weight" for layer in mtp)
    is_tied = architecture.tie_word_embeddings
    rows = [_bind(EMBEDDING, architecture, copies=embeddings + heads * is_tied)]
    for layer in range(architecture.num_layers):
        is_moe = moe is not None and layer in moe.layers
        rows += _layer_rows(architecture, layer, is_moe=is_moe)
    rows.append(_bind(FINAL_NORM, architecture))
    if not is_tied:
        rows.append(_bind(OUTPUT, architecture, copies=heads))
    for layer in mtp:
        rows += [_bind(row, architecture, layer) for row in MTP_ROWS]
        # It repeats the last layer's kind.
        rows += _layer_rows(architecture, layer, is_moe=moe is not None)
    return tuple(rows)


def rows_by_megatron_name(architecture: ModelArchitecture) -> dict[str, ParamRow]:
    """Rows by every name a rank may use: local, Transformer Engine, and the tied copy.

    With tied embeddings and several pipeline stages the last stage holds a copy of the embedding
    named `output_layer.weight`.
    """
    rows = param_rows(architecture)
    named = {row.megatron: row for row in rows}
    named |= {row.te_name: row for row in rows if row.te_name is not None}
    if architecture.tie_word_embeddings:
        named[OUTPUT.megatron] = named[EMBEDDING.megatron]
    return named


def _layer_rows(architecture: ModelArchitecture, layer: int, *, is_moe: bool) -> Iterator[ParamRow]:
    table, moe = FAMILY_TABLES[architecture.family], architecture.moe
    for row in (*table.attention, *(table.moe if is_moe else table.dense)):
        if row.when(architecture):
            experts = range(moe.num_experts) if moe is not None and row.expert else (None,)
            for expert in experts:
                yield _bind(row, architecture, layer, expert)


def _bind(
    row: Row,
    architecture: ModelArchitecture,
    layer: int | None = None,
    expert: int | None = None,
    copies: tuple[str, ...] = (),
) -> ParamRow:
    """The row of one layer; layers beyond the decoder's are those for further tokens."""
    mtp = None if layer is None else layer - architecture.num_layers
    sizes = _sizes(architecture)

    def name(pattern: str) -> str:
        if mtp is not None and mtp >= 0:
            pattern = pattern.replace(DECODER_PREFIX, MTP_PREFIX)
        return pattern.format(layer=layer, expert=expert, mtp=mtp)

    return ParamRow(
        megatron=name(row.megatron),
        te_name=row.te_name and name(row.te_name),
        hf={
            name(pattern): tuple(sizes[size] for size in shape.split())
            for pattern, shape in row.hf.items()
        },
        layout=row.layout(architecture),
        fp8=row.fp8,
        expert=row.expert,
        keep_dtype=row.keep_dtype,
        copies=copies,
    )


def _sizes(architecture: ModelArchitecture) -> dict[str, int]:
    """The sizes that tables name."""
    heads, head_dim = architecture.num_attention_heads, architecture.head_dim
    sizes = {
        "hidden": architecture.hidden_size,
        "two_hidden": 2 * architecture.hidden_size,
        "query": heads * head_dim,
        "key": architecture.num_key_value_heads * head_dim,
        "head": head_dim,
        "ffn": architecture.ffn_hidden_size,
        "two_ffn": 2 * architecture.ffn_hidden_size,
        "vocab": architecture.vocab_size,
    }
    moe, mla = architecture.moe, architecture.mla
    if moe is not None:
        sizes |= {
            "experts": moe.num_experts,
            "expert_ffn": moe.ffn_hidden_size,
            "shared_ffn": moe.shared_ffn_hidden_size,
        }
    if mla is not None:
        sizes |= {
            "latent_query": heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim),
            "query_rank": mla.q_lora_rank or 0,
            "key_down": mla.kv_lora_rank + mla.qk_rope_head_dim,
            "key_rank": mla.kv_lora_rank,
            "key_up": heads * (mla.qk_nope_head_dim + mla.v_head_dim),
            "latent_value": heads * mla.v_head_dim,
        }
    return sizes
