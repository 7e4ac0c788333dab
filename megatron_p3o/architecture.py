"""What a Hugging Face model directory says about its model, read without torch.

`config.json` is read strictly. Every field is either read into `ModelArchitecture`, or must hold
the only value for which this code computes the same, or is known not to matter; any other field is
refused by name. An ignored rope or attention field would train a different
model without a sign of it.

Both spellings are read: transformers 5 (`rope_parameters`, `dtype`) and transformers 4
(`rope_theta`, `rope_scaling`, `torch_dtype`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_p3o.errors import InputError
from megatron_p3o.model_files import model_error, read_json, read_weight_headers

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

_FAMILY_OF: Mapping[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}

# Fields that change the computation, with the values under which it is the one computed here.
# attention_bias: Hugging Face then also puts a bias on the output projection, which Megatron has
# only together with biases in the MLP.
_FIXED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False, None),
    "attention_dropout": (0.0, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1.0, None),
    "rope_interleaved": (False,),
    "use_sliding_window": (False, None),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
}

# sliding_window and max_window_layers are unused while use_sliding_window is false. The weight of
# the load-balancing loss belongs to pre-training; ours is model.moe_aux_loss_coefficient.
_IRRELEVANT_FIELDS: Mapping[str, frozenset[str]] = {
    "llama": frozenset({"is_llama_config"}),
    "qwen2": frozenset({"sliding_window", "max_window_layers"}),
    "qwen3": frozenset({"sliding_window", "max_window_layers"}),
    "qwen3_moe": frozenset(
        {"sliding_window", "max_window_layers", "output_router_logits", "router_aux_loss_coef"}
    ),
}
_IRRELEVANT_ANYWHERE = frozenset(
    {
        *("transformers_version", "_name_or_path", "_attn_implementation_autoset"),
        *("use_cache", "torchscript", "return_dict", "output_attentions", "output_hidden_states"),
        *(
            "bos_token_id",
            "pad_token_id",
            "unk_token_id",
            "tokenizer_class",
            "transformers.js_config",
        ),
        *("max_length", "do_sample", "temperature", "top_k", "top_p", "is_decoder"),
        *("id2label", "label2id", "num_labels", "problem_type", "task_specific_params"),
    }
)

# Megatron's RotaryEmbedding._apply_scaling fixes these and takes only the factor.
_MEGATRON_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, kw_only=True)
class MoeArchitecture:
    """Layers whose MLP is a mixture of experts: a softmax router and equal gated experts."""

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
    """{"rope_type": "llama3", "factor": ...}, or None for plain RoPE."""
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


def read_architecture(model_dir: str | Path) -> ModelArchitecture:
    """Read and check a Hugging Face model directory: its configuration and its weight files.

    Raises:
        InputError: the directory, config.json or weights are missing or incomplete, the
            architecture is not supported, or a field asks for a computation not built here.
    """
    model_dir = Path(model_dir)
    if not model_dir.is_dir():
        raise model_error(model_dir, "no such directory; give a Hugging Face model directory")
    config = _Fields(model_dir, read_json(model_dir, "config.json"))
    family = _family(config)
    read_weight_headers(model_dir)

    hidden_size = config.positive_int("hidden_size")
    num_heads = config.positive_int("num_attention_heads")
    # What transformers takes where config.json is silent.
    default_head_dim = 128 if family == "qwen3" else hidden_size // num_heads
    num_kv_heads = config.positive_int("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise config.error(
            f"num_key_value_heads={num_kv_heads} must divide num_attention_heads={num_heads}; "
            "mend config.json"
        )
    rope_theta, rope_scaling = _rope(config)
    architecture = ModelArchitecture(
        family=family,
        num_layers=config.positive_int("num_hidden_layers"),
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=config.positive_int("head_dim", default=default_head_dim),
        ffn_hidden_size=config.positive_int("intermediate_size"),
        vocab_size=config.positive_int("vocab_size"),
        max_position_embeddings=config.positive_int("max_position_embeddings"),
        norm_epsilon=config.positive_float("rms_norm_eps"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        qkv_bias=family == "qwen2",
        qk_layernorm=family in ("qwen3", "qwen3_moe"),
        initializer_range=config.positive_float("initializer_range", default=0.02),
        eos_token_ids=_eos_token_ids(config),
        torch_dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
        moe=_moe(config) if family == "qwen3_moe" else None,
    )
    _check_other_fields(config, family)
    return architecture


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int, divisible_by: int = 128) -> int:
    """Least multiple of `divisible_by` x `tensor_parallel_size` that holds the vocabulary.

    As `_vocab_size_with_padding` of Megatron-LM.
    """
    multiple = divisible_by * tensor_parallel_size
    return math.ceil(vocab_size / multiple) * multiple


class _Fields:
    """The fields of a JSON object, typed, with a record of those that were read."""

    def __init__(self, model_dir: Path, values: Mapping[str, Any]) -> None:
        self.model_dir = model_dir
        self._values = values
        self._read: set[str] = set()

    def error(self, problem: str) -> InputError:
        return model_error(self.model_dir, f"config.json: {problem}")

    def get(self, field: str) -> Any:
        """The value, or None for a missing field."""
        self._read.add(field)
        return self._values.get(field)

    def positive_int(self, field: str, *, default: int | None = None) -> int:
        value = self.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"{field}={value!r} must be a positive integer; mend it")
        return value

    def positive_float(self, field: str, *, default: float | None = None) -> float:
        value = self.get(field)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.error(f"{field}={value!r} must be a number above 0; mend it")
        return float(value)

    def flag(self, field: str) -> bool:
        value = self.get(field) or False
        if not isinstance(value, bool):
            raise self.error(f"{field}={value!r} must be true or false; mend it")
        return value

    def unread(self) -> dict[str, Any]:
        return {name: value for name, value in self._values.items() if name not in self._read}


def _family(config: _Fields) -> Family:
    names, model_type = config.get("architectures"), config.get("model_type")
    for name, family in _FAMILY_OF.items():
        if names in ([name], None) and model_type == family:
            return family
    raise config.error(
        f"architectures={names!r} with model_type={model_type!r} is not supported; use a model of "
        f"{' or '.join(_FAMILY_OF)}"
    )


def _check_other_fields(config: _Fields, family: Family) -> None:
    """Refuse a computation that no field of `ModelArchitecture` expresses."""
    irrelevant = _IRRELEVANT_ANYWHERE | _IRRELEVANT_FIELDS[family]
    for field, value in config.unread().items():
        if field in irrelevant:
            continue
        if field == "layer_types" and set(value or ()) <= {"full_attention"}:
            continue
        if field not in _FIXED_FIELDS:
            raise config.error(
                f"{field}={value!r} is not known here and may change the computation; use a "
                "model without it"
            )
        if value not in _FIXED_FIELDS[field]:
            raise config.error(
                f"{field}={value!r} is not supported, it must be {_FIXED_FIELDS[field][0]!r}; use "
                "a model with that value"
            )


def _moe(config: _Fields) -> MoeArchitecture | None:
    """None where every layer is dense, as `Qwen3MoeDecoderLayer` of transformers decides."""
    # transformers writes either name.
    counts = {config.get(name) for name in ("num_experts", "num_local_experts")} - {None}
    if len(counts) != 1 or not isinstance(num_experts := counts.pop(), int) or num_experts < 1:
        raise config.error("num_experts must be given once, as a positive integer; mend it")
    per_token = config.positive_int("num_experts_per_tok")
    normalize_topk = config.flag("norm_topk_prob")
    if per_token > num_experts:
        raise config.error(
            f"num_experts_per_tok={per_token} must be <= num_experts={num_experts}; mend it"
        )
    if per_token == 1 and normalize_topk:
        raise config.error(
            "norm_topk_prob=true with num_experts_per_tok=1 makes every router weight 1, so that "
            "the router cannot learn, and Megatron refuses it; use a model with norm_topk_prob="
            "false or several experts per token"
        )
    step = config.positive_int("decoder_sparse_step", default=1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise config.error(f"mlp_only_layers={dense!r} must be a list of layer indices; mend it")
    layers = tuple(
        layer
        for layer in range(config.positive_int("num_hidden_layers"))
        if layer not in dense and (layer + 1) % step == 0
    )
    ffn_hidden_size = config.positive_int("moe_intermediate_size")
    if not layers:
        return None
    return MoeArchitecture(
        num_experts=num_experts,
        experts_per_token=per_token,
        ffn_hidden_size=ffn_hidden_size,
        normalize_topk=normalize_topk,
        layers=layers,
    )


def _rope(config: _Fields) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling); where both spellings are there, in transformers' order of precedence."""
    legacy, present = config.get("rope_scaling"), config.get("rope_parameters")
    values = {"rope_theta": config.get("rope_theta"), **(legacy or present or {})}
    if values["rope_theta"] is None:
        values["rope_theta"] = 10000.0
    rope = _Fields(config.model_dir, values)
    theta = rope.positive_float("rope_theta")
    rope_type, legacy_type = rope.get("rope_type"), rope.get("type")
    rope_type = rope_type or legacy_type or "default"
    scaling = None
    if rope_type == "llama3":
        scaling = {"rope_type": "llama3", "factor": rope.positive_float("factor")}
        for field, value in _MEGATRON_LLAMA3_ROPE.items():
            if rope.get(field) != value:
                raise rope.error(
                    f"rope field {field}={rope.get(field)!r} is not supported, Megatron's llama3 "
                    f"rope has {value!r}; use a model with that value"
                )
    elif rope_type != "default":
        raise rope.error(f"rope_type={rope_type!r} is not supported; use default or llama3")
    for field, value in rope.unread().items():
        raise rope.error(
            f"rope field {field}={value!r} is not known for rope_type={rope_type!r}; use a model "
            "without it"
        )
    return theta, scaling


def _eos_token_ids(config: _Fields) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    if (config.model_dir / "generation_config.json").is_file():
        generation = read_json(config.model_dir, "generation_config.json")
        if generation.get("eos_token_id") is not None:
            value = generation["eos_token_id"]
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in ids):
        raise config.error(f"eos_token_id={value!r} must be an integer or a list of them; mend it")
    return tuple(ids)
