"""Tables that map Megatron parameters to Hugging Face tensors, one table per model family.

A table row names a Megatron parameter, the Hugging Face tensors it holds with their shapes, and
the layout that converts between them. Everything about a parameter is a column of its row: its
layout, whether it may be stored in FP8, and its name under Transformer Engine, which keeps the
norm in front of a linear layer as `layer_norm_weight` of that layer. To support another family,
write its table.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_p3o.architecture import Family, ModelArchitecture
from megatron_p3o.weights.layouts import GateUp, Layout, Qkv, Replicated, RowParallel, Vocab


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamRow:
    """One Megatron parameter of one model, by its global name (layers counted over all stages)."""

    megatron: str
    """Name in a model of Megatron's local layers."""
    te_name: str | None
    """Name in a model of Transformer Engine layers, where it differs."""
    hf: Mapping[str, tuple[int, ...]]
    """Hugging Face tensors by name, in the layout's order, with their shapes."""
    layout: Layout
    fp8: bool
    """Whether the weight may be stored in FP8: linear layers of the decoder only."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A row for every model of a family. Names may hold `{layer}`, shapes are named sizes."""

    megatron: str
    hf: Mapping[str, str]
    layout: Callable[[ModelArchitecture], Layout]
    fp8: bool = False
    te_name: str | None = None


def _replicated(architecture: ModelArchitecture) -> Layout:
    return Replicated()


def _row_parallel(architecture: ModelArchitecture) -> Layout:
    return RowParallel()


def _gate_up(architecture: ModelArchitecture) -> Layout:
    return GateUp()


def _vocab(architecture: ModelArchitecture) -> Layout:
    return Vocab(architecture.vocab_size)


def _qkv(architecture: ModelArchitecture) -> Layout:
    return Qkv(
        architecture.num_attention_heads, architecture.num_key_value_heads, architecture.head_dim
    )


_MEGATRON = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."

_EMBEDDING = _Row(
    "embedding.word_embeddings.weight", {"model.embed_tokens.weight": "vocab hidden"}, _vocab
)
_FINAL_NORM = _Row("decoder.final_layernorm.weight", {"model.norm.weight": "hidden"}, _replicated)
_OUTPUT = _Row("output_layer.weight", {"lm_head.weight": "vocab hidden"}, _vocab)

_QKV_WEIGHT = _Row(
    _MEGATRON + "self_attention.linear_qkv.weight",
    {
        _HF + "self_attn.q_proj.weight": "query hidden",
        _HF + "self_attn.k_proj.weight": "key hidden",
        _HF + "self_attn.v_proj.weight": "key hidden",
    },
    _qkv,
    fp8=True,
)
_QKV_BIAS = _Row(
    _MEGATRON + "self_attention.linear_qkv.bias",
    {
        _HF + "self_attn.q_proj.bias": "query",
        _HF + "self_attn.k_proj.bias": "key",
        _HF + "self_attn.v_proj.bias": "key",
    },
    _qkv,
)
_ATTENTION_OUTPUT = _Row(
    _MEGATRON + "self_attention.linear_proj.weight",
    {_HF + "self_attn.o_proj.weight": "hidden query"},
    _row_parallel,
    fp8=True,
)
_QUERY_NORM = _Row(
    _MEGATRON + "self_attention.q_layernorm.weight",
    {_HF + "self_attn.q_norm.weight": "head"},
    _replicated,
)
_KEY_NORM = _Row(
    _MEGATRON + "self_attention.k_layernorm.weight",
    {_HF + "self_attn.k_norm.weight": "head"},
    _replicated,
)
_MLP_IN = _Row(
    _MEGATRON + "mlp.linear_fc1.weight",
    {_HF + "mlp.gate_proj.weight": "ffn hidden", _HF + "mlp.up_proj.weight": "ffn hidden"},
    _gate_up,
    fp8=True,
)
_MLP_OUT = _Row(
    _MEGATRON + "mlp.linear_fc2.weight",
    {_HF + "mlp.down_proj.weight": "hidden ffn"},
    _row_parallel,
    fp8=True,
)
_ATTENTION_NORM = _Row(
    _MEGATRON + "input_layernorm.weight",
    {_HF + "input_layernorm.weight": "hidden"},
    _replicated,
    te_name=_MEGATRON + "self_attention.linear_qkv.layer_norm_weight",
)
_MLP_NORM = _Row(
    _MEGATRON + "pre_mlp_layernorm.weight",
    {_HF + "post_attention_layernorm.weight": "hidden"},
    _replicated,
    te_name=_MEGATRON + "mlp.linear_fc1.layer_norm_weight",
)

_MLP_AND_NORMS = (_MLP_IN, _MLP_OUT, _ATTENTION_NORM, _MLP_NORM)

_LAYER_TABLES: Mapping[Family, tuple[_Row, ...]] = {
    "llama": (_QKV_WEIGHT, _ATTENTION_OUTPUT, *_MLP_AND_NORMS),
    "mistral": (_QKV_WEIGHT, _ATTENTION_OUTPUT, *_MLP_AND_NORMS),
    "qwen2": (_QKV_WEIGHT, _QKV_BIAS, _ATTENTION_OUTPUT, *_MLP_AND_NORMS),
    "qwen3": (_QKV_WEIGHT, _ATTENTION_OUTPUT, _QUERY_NORM, _KEY_NORM, *_MLP_AND_NORMS),
}


def param_rows(architecture: ModelArchitecture) -> tuple[ParamRow, ...]:
    """Every parameter of the model, in the order of a Hugging Face checkpoint.

    Tied embeddings have one row, the embedding's.
    """
    layer_table = _LAYER_TABLES[architecture.family]
    rows = [_bind(_EMBEDDING, architecture)]
    for layer in range(architecture.num_layers):
        rows += [_bind(row, architecture, layer) for row in layer_table]
    rows.append(_bind(_FINAL_NORM, architecture))
    if not architecture.tie_word_embeddings:
        rows.append(_bind(_OUTPUT, architecture))
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
        named[_OUTPUT.megatron] = named[_EMBEDDING.megatron]
    return named


def _bind(row: _Row, architecture: ModelArchitecture, layer: int | None = None) -> ParamRow:
    sizes = {
        "hidden": architecture.hidden_size,
        "query": architecture.num_attention_heads * architecture.head_dim,
        "key": architecture.num_key_value_heads * architecture.head_dim,
        "head": architecture.head_dim,
        "ffn": architecture.ffn_hidden_size,
        "vocab": architecture.vocab_size,
    }
    return ParamRow(
        megatron=row.megatron.format(layer=layer),
        te_name=row.te_name and row.te_name.format(layer=layer),
        hf={
            name.format(layer=layer): tuple(sizes[size] for size in shape.split())
            for name, shape in row.hf.items()
        },
        layout=row.layout(architecture),
        fp8=row.fp8,
    )
