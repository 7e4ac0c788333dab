"""The rows of every model family: which tensors a layer has and how they are converted.

A row is a Megatron parameter, the Hugging Face tensors in it with the names of their sizes, and a
layout. `megatron_p3o.weights.families` binds rows to the sizes of a model. To support another
family, write its rows and its entry of `FAMILY_TABLES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_p3o.architecture import Family, ModelArchitecture
from megatron_p3o.weights.layouts import (
    ColumnParallel,
    FusedGateUp,
    GateUp,
    Layout,
    Qkv,
    Replicated,
    RowParallel,
    Vocab,
)


def _always(architecture: ModelArchitecture) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Row:
    """A row for every model of a family. Names may hold `{layer}` and, for experts, `{expert}`;
    shapes are named sizes."""

    megatron: str
    hf: Mapping[str, str]
    layout: Callable[[ModelArchitecture], Layout]
    fp8: bool = False
    te_name: str | None = None
    expert: bool = False
    keep_dtype: bool = False
    """Whether it keeps its dtype whatever the other weights are converted to."""
    when: Callable[[ModelArchitecture], bool] = _always
    """Whether a model of the family has it at all."""


def _replicated(architecture: ModelArchitecture) -> Layout:
    return Replicated()


def _row_parallel(architecture: ModelArchitecture) -> Layout:
    return RowParallel()


def _gate_up(architecture: ModelArchitecture) -> Layout:
    return GateUp()


def _fused_gate_up(architecture: ModelArchitecture) -> Layout:
    return FusedGateUp()


def _heads(architecture: ModelArchitecture) -> Layout:
    return ColumnParallel(architecture.num_attention_heads)


def _columns(architecture: ModelArchitecture) -> Layout:
    return ColumnParallel(architecture.hidden_size)


def _vocab(architecture: ModelArchitecture) -> Layout:
    return Vocab(architecture.vocab_size)


def _qkv(architecture: ModelArchitecture) -> Layout:
    return Qkv(
        architecture.num_attention_heads, architecture.num_key_value_heads, architecture.head_dim
    )


DECODER_PREFIX = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."

EMBEDDING = Row(
    "embedding.word_embeddings.weight", {"model.embed_tokens.weight": "vocab hidden"}, _vocab
)
FINAL_NORM = Row("decoder.final_layernorm.weight", {"model.norm.weight": "hidden"}, _replicated)
OUTPUT = Row("output_layer.weight", {"lm_head.weight": "vocab hidden"}, _vocab)

_QKV_WEIGHT = Row(
    DECODER_PREFIX + "self_attention.linear_qkv.weight",
    {
        _HF + "self_attn.q_proj.weight": "query hidden",
        _HF + "self_attn.k_proj.weight": "key hidden",
        _HF + "self_attn.v_proj.weight": "key hidden",
    },
    _qkv,
    fp8=True,
)
_QKV_BIAS = Row(
    DECODER_PREFIX + "self_attention.linear_qkv.bias",
    {
        _HF + "self_attn.q_proj.bias": "query",
        _HF + "self_attn.k_proj.bias": "key",
        _HF + "self_attn.v_proj.bias": "key",
    },
    _qkv,
    when=lambda architecture: architecture.qkv_bias,
)
_ATTENTION_OUTPUT = Row(
    DECODER_PREFIX + "self_attention.linear_proj.weight",
    {_HF + "self_attn.o_proj.weight": "hidden query"},
    _row_parallel,
    fp8=True,
)
_QUERY_NORM = Row(
    DECODER_PREFIX + "self_attention.q_layernorm.weight",
    {_HF + "self_attn.q_norm.weight": "head"},
    _replicated,
    when=lambda architecture: architecture.qk_layernorm,
)
_KEY_NORM = Row(
    DECODER_PREFIX + "self_attention.k_layernorm.weight",
    {_HF + "self_attn.k_norm.weight": "head"},
    _replicated,
    when=lambda architecture: architecture.qk_layernorm,
)
_MLP_IN = Row(
    DECODER_PREFIX + "mlp.linear_fc1.weight",
    {_HF + "mlp.gate_proj.weight": "ffn hidden", _HF + "mlp.up_proj.weight": "ffn hidden"},
    _gate_up,
    fp8=True,
)
_MLP_OUT = Row(
    DECODER_PREFIX + "mlp.linear_fc2.weight",
    {_HF + "mlp.down_proj.weight": "hidden ffn"},
    _row_parallel,
    fp8=True,
)
_ATTENTION_NORM = Row(
    DECODER_PREFIX + "input_layernorm.weight",
    {_HF + "input_layernorm.weight": "hidden"},
    _replicated,
    te_name=DECODER_PREFIX + "self_attention.linear_qkv.layer_norm_weight",
)
_MLP_NORM = Row(
    DECODER_PREFIX + "pre_mlp_layernorm.weight",
    {_HF + "post_attention_layernorm.weight": "hidden"},
    _replicated,
    te_name=DECODER_PREFIX + "mlp.linear_fc1.layer_norm_weight",
)

_ROUTER = Row(
    DECODER_PREFIX + "mlp.router.weight", {_HF + "mlp.gate.weight": "experts hidden"}, _replicated
)
_EXPERT_IN = Row(
    DECODER_PREFIX + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
    {
        _HF + "mlp.experts.{expert}.gate_proj.weight": "expert_ffn hidden",
        _HF + "mlp.experts.{expert}.up_proj.weight": "expert_ffn hidden",
    },
    _gate_up,
    fp8=True,
    te_name=DECODER_PREFIX + "mlp.experts.linear_fc1.weight{expert}",
    expert=True,
)
_EXPERT_OUT = Row(
    DECODER_PREFIX + "mlp.experts.local_experts.{expert}.linear_fc2.weight",
    {_HF + "mlp.experts.{expert}.down_proj.weight": "hidden expert_ffn"},
    _row_parallel,
    fp8=True,
    te_name=DECODER_PREFIX + "mlp.experts.linear_fc2.weight{expert}",
    expert=True,
)
# The router reads the norm's output too, so Transformer Engine cannot keep it in the experts.
_MOE_NORM = Row(
    DECODER_PREFIX + "pre_mlp_layernorm.weight",
    {_HF + "post_attention_layernorm.weight": "hidden"},
    _replicated,
)

_EXPERT_BIAS = Row(
    DECODER_PREFIX + "mlp.router.expert_bias",
    {_HF + "mlp.gate.e_score_correction_bias": "experts"},
    _replicated,
    keep_dtype=True,
    when=lambda architecture: architecture.moe is not None and architecture.moe.has_expert_bias,
)


def _has_shared_expert(architecture: ModelArchitecture) -> bool:
    return architecture.moe is not None and architecture.moe.shared_ffn_hidden_size > 0


_SHARED_IN = Row(
    DECODER_PREFIX + "mlp.shared_experts.linear_fc1.weight",
    {
        _HF + "mlp.shared_experts.gate_proj.weight": "shared_ffn hidden",
        _HF + "mlp.shared_experts.up_proj.weight": "shared_ffn hidden",
    },
    _gate_up,
    fp8=True,
    when=_has_shared_expert,
)
_SHARED_OUT = Row(
    DECODER_PREFIX + "mlp.shared_experts.linear_fc2.weight",
    {_HF + "mlp.shared_experts.down_proj.weight": "hidden shared_ffn"},
    _row_parallel,
    fp8=True,
    when=_has_shared_expert,
)

_MIXTRAL_ROUTER = Row(
    DECODER_PREFIX + "mlp.router.weight",
    {_HF + "block_sparse_moe.gate.weight": "experts hidden"},
    _replicated,
)
_MIXTRAL_EXPERT_IN = Row(
    DECODER_PREFIX + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
    {
        _HF + "block_sparse_moe.experts.{expert}.w1.weight": "expert_ffn hidden",
        _HF + "block_sparse_moe.experts.{expert}.w3.weight": "expert_ffn hidden",
    },
    _gate_up,
    fp8=True,
    te_name=DECODER_PREFIX + "mlp.experts.linear_fc1.weight{expert}",
    expert=True,
)
_MIXTRAL_EXPERT_OUT = Row(
    DECODER_PREFIX + "mlp.experts.local_experts.{expert}.linear_fc2.weight",
    {_HF + "block_sparse_moe.experts.{expert}.w2.weight": "hidden expert_ffn"},
    _row_parallel,
    fp8=True,
    te_name=DECODER_PREFIX + "mlp.experts.linear_fc2.weight{expert}",
    expert=True,
)

_GLM4_MLP_IN = Row(
    DECODER_PREFIX + "mlp.linear_fc1.weight",
    {_HF + "mlp.gate_up_proj.weight": "two_ffn hidden"},
    _fused_gate_up,
    fp8=True,
)
# Norms behind attention and MLP; Megatron-Core has no such norms, its forks name them so.
_POST_ATTENTION_NORM = Row(
    DECODER_PREFIX + "post_self_attn_layernorm.weight",
    {_HF + "post_self_attn_layernorm.weight": "hidden"},
    _replicated,
)
_POST_MLP_NORM = Row(
    DECODER_PREFIX + "post_mlp_layernorm.weight",
    {_HF + "post_mlp_layernorm.weight": "hidden"},
    _replicated,
)


def _has_query_rank(architecture: ModelArchitecture) -> bool:
    return architecture.mla is not None and architecture.mla.q_lora_rank is not None


def _has_no_query_rank(architecture: ModelArchitecture) -> bool:
    return not _has_query_rank(architecture)


# Latent attention has no linear_qkv that could keep the norm in front of it.
_LATENT_NORM = Row(
    DECODER_PREFIX + "input_layernorm.weight",
    {_HF + "input_layernorm.weight": "hidden"},
    _replicated,
)
_LATENT_QUERY = Row(
    DECODER_PREFIX + "self_attention.linear_q_proj.weight",
    {_HF + "self_attn.q_proj.weight": "latent_query hidden"},
    _heads,
    fp8=True,
    when=_has_no_query_rank,
)
_LATENT_QUERY_DOWN = Row(
    DECODER_PREFIX + "self_attention.linear_q_down_proj.weight",
    {_HF + "self_attn.q_a_proj.weight": "query_rank hidden"},
    _replicated,
    fp8=True,
    when=_has_query_rank,
)
_LATENT_QUERY_NORM = Row(
    DECODER_PREFIX + "self_attention.q_layernorm.weight",
    {_HF + "self_attn.q_a_layernorm.weight": "query_rank"},
    _replicated,
    te_name=DECODER_PREFIX + "self_attention.linear_q_up_proj.layer_norm_weight",
    when=_has_query_rank,
)
_LATENT_QUERY_UP = Row(
    DECODER_PREFIX + "self_attention.linear_q_up_proj.weight",
    {_HF + "self_attn.q_b_proj.weight": "latent_query query_rank"},
    _heads,
    fp8=True,
    when=_has_query_rank,
)
_LATENT_KEY_DOWN = Row(
    DECODER_PREFIX + "self_attention.linear_kv_down_proj.weight",
    {_HF + "self_attn.kv_a_proj_with_mqa.weight": "key_down hidden"},
    _replicated,
    fp8=True,
)
_LATENT_KEY_NORM = Row(
    DECODER_PREFIX + "self_attention.kv_layernorm.weight",
    {_HF + "self_attn.kv_a_layernorm.weight": "key_rank"},
    _replicated,
    te_name=DECODER_PREFIX + "self_attention.linear_kv_up_proj.layer_norm_weight",
)
_LATENT_KEY_UP = Row(
    DECODER_PREFIX + "self_attention.linear_kv_up_proj.weight",
    {_HF + "self_attn.kv_b_proj.weight": "key_up key_rank"},
    _heads,
    fp8=True,
)
_LATENT_OUTPUT = Row(
    DECODER_PREFIX + "self_attention.linear_proj.weight",
    {_HF + "self_attn.o_proj.weight": "hidden latent_value"},
    _row_parallel,
    fp8=True,
)

# Around the transformer layer that predicts the token after the next (DeepSeek-V3, section 2.2).
MTP_ROWS = (
    Row("mtp.layers.{mtp}.enorm.weight", {_HF + "enorm.weight": "hidden"}, _replicated),
    Row("mtp.layers.{mtp}.hnorm.weight", {_HF + "hnorm.weight": "hidden"}, _replicated),
    Row("mtp.layers.{mtp}.eh_proj.weight", {_HF + "eh_proj.weight": "hidden two_hidden"}, _columns),
    Row(
        "mtp.layers.{mtp}.final_layernorm.weight",
        {_HF + "shared_head.norm.weight": "hidden"},
        _replicated,
    ),
)
MTP_PREFIX = "mtp.layers.{mtp}.transformer_layer."


@dataclass(frozen=True, slots=True)
class FamilyTable:
    """The rows of one layer."""

    attention: tuple[Row, ...]
    dense: tuple[Row, ...] = ()
    moe: tuple[Row, ...] = ()


_PLAIN = (_QKV_WEIGHT, _QKV_BIAS, _ATTENTION_OUTPUT)
_WITH_NORMS = (*_PLAIN, _QUERY_NORM, _KEY_NORM)
_LATENT = (
    *(_LATENT_QUERY, _LATENT_QUERY_DOWN, _LATENT_QUERY_NORM, _LATENT_QUERY_UP),
    *(_LATENT_KEY_DOWN, _LATENT_KEY_NORM, _LATENT_KEY_UP, _LATENT_OUTPUT),
)
_DENSE = (_MLP_IN, _MLP_OUT, _ATTENTION_NORM, _MLP_NORM)
_MOE = (_ROUTER, _EXPERT_IN, _EXPERT_OUT, _ATTENTION_NORM, _MOE_NORM)
_MIXTRAL = (_MIXTRAL_ROUTER, _MIXTRAL_EXPERT_IN, _MIXTRAL_EXPERT_OUT, _ATTENTION_NORM, _MOE_NORM)
_SHARED = (_EXPERT_BIAS, _SHARED_IN, _SHARED_OUT)
_GLM4 = (_GLM4_MLP_IN, _MLP_OUT, _ATTENTION_NORM, _MLP_NORM, _POST_ATTENTION_NORM, _POST_MLP_NORM)
_LATENT_DENSE = (_MLP_IN, _MLP_OUT, _LATENT_NORM, _MLP_NORM)
_LATENT_MOE = (_ROUTER, *_SHARED, _EXPERT_IN, _EXPERT_OUT, _LATENT_NORM, _MOE_NORM)

FAMILY_TABLES: Mapping[Family, FamilyTable] = {
    "llama": FamilyTable(_PLAIN, _DENSE),
    "mistral": FamilyTable(_PLAIN, _DENSE),
    "mixtral": FamilyTable(_PLAIN, moe=_MIXTRAL),
    "qwen2": FamilyTable(_PLAIN, _DENSE),
    "qwen3": FamilyTable(_WITH_NORMS, _DENSE),
    "qwen3_moe": FamilyTable(_WITH_NORMS, _DENSE, _MOE),
    "glm4": FamilyTable(_PLAIN, _GLM4),
    "glm4_moe": FamilyTable(_WITH_NORMS, _DENSE, (*_MOE, *_SHARED)),
    "deepseek_v2": FamilyTable(_LATENT, _LATENT_DENSE, _LATENT_MOE),
    "deepseek_v3": FamilyTable(_LATENT, _LATENT_DENSE, _LATENT_MOE),
}
