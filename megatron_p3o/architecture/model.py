"""The fields that decide a model. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Family = Literal[
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "glm4",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
]
"""Families whose weights have a table; those of `_FAMILY_OF` can be trained as well."""


@dataclass(frozen=True, kw_only=True)
class MoeArchitecture:
    """Layers whose MLP is a mixture of experts: a router and equal gated experts."""

    num_experts: int
    experts_per_token: int
    ffn_hidden_size: int
    """Of one expert."""
    normalize_topk: bool
    """Whether the weights of a token's experts are scaled to sum to 1."""
    layers: tuple[int, ...]
    """Indices of the mixture-of-experts layers; the others are dense."""
    shared_ffn_hidden_size: int = 0
    """Of the expert that takes every token; 0: there is none."""
    has_expert_bias: bool = False
    """A bias on the scores that choose the experts, outside the gradient."""
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Of the router's logits."""
    scaling_factor: float = 1.0
    """Multiplies the weights of a token's experts."""
    num_groups: int = 1
    """Experts lie in as many equal groups."""
    groups_per_token: int = 1
    """Groups that a token's experts are chosen from."""


@dataclass(frozen=True, kw_only=True)
class MlaArchitecture:
    """Multi-head latent attention: keys and values, and perhaps queries, through a low rank."""

    q_lora_rank: int | None
    """None: queries are projected directly."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    """Channels of a query or key head without a position."""
    qk_rope_head_dim: int
    """Those with one, shared by all heads of the keys."""
    v_head_dim: int


@dataclass(frozen=True, kw_only=True)
class ModelArchitecture:
    """Every field that decides a GPT-like decoder with RMSNorm, RoPE and a gated SiLU MLP."""

    family: Family
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Channels of one attention head; heads x head_dim need not equal hidden_size."""
    ffn_hidden_size: int
    """Of the dense layers."""
    vocab_size: int
    """Rows of the embedding, without Megatron's padding."""
    max_position_embeddings: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    """{"rope_type": "llama3" or "yarn", "factor": ..., ...}, or None for plain RoPE."""
    tie_word_embeddings: bool
    qkv_bias: bool
    """A bias on the query, key and value projections, none on the output projection."""
    qk_layernorm: bool
    """RMSNorm over each head of query and key, before RoPE."""
    initializer_range: float
    eos_token_ids: tuple[int, ...]
    """Tokens that end a response; generation_config.json takes precedence over config.json."""
    torch_dtype: str
    """Name of the dtype that config.json declares, such as "bfloat16"."""
    moe: MoeArchitecture | None = None
    """None for a dense model."""
    mla: MlaArchitecture | None = None
    """None for attention with plain projections."""
    num_mtp_layers: int = 0
    """Layers after the last one that predict further tokens."""
    rotary_fraction: float = 1.0
    """Share of each head's channels that RoPE turns, from the first."""
    rotary_interleaved: bool = False
    """RoPE turns neighbouring channels, not channels half a head apart."""
    has_post_norms: bool = False
    """Norms behind attention and MLP, before what they give is added to the residual."""


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int, divisible_by: int = 128) -> int:
    """Least multiple of `divisible_by` x `tensor_parallel_size` that holds the vocabulary.

    As `_vocab_size_with_padding` of Megatron-LM.
    """
    multiple = divisible_by * tensor_parallel_size
    return math.ceil(vocab_size / multiple) * multiple
