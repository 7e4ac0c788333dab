"""The tensors that a config.json calls for.

`megatron_p3o.architecture.read_architecture` asks whether this code computes what a config.json
means, and refuses every field it does not know. Moving weights needs less: the sizes of the
tensors. So more families and any kind of rope are read here; config.json itself is carried along.
A field that would add tensors, such as a bias, shows as a tensor without a place in the table.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_p3o.architecture import (
    Family,
    MlaArchitecture,
    ModelArchitecture,
    MoeArchitecture,
)
from megatron_p3o.errors import InputError
from megatron_p3o.weights.tables import FAMILY_TABLES

# transformers writes `model_type` with underscores, which are the names of the tables.
_FAMILIES: tuple[Family, ...] = tuple(FAMILY_TABLES)


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a directory.

    Raises:
        InputError: it is missing or not a JSON object.
    """
    path = directory / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read ({error.strerror}); add it") from error
    except ValueError as error:
        raise InputError(f"{str(path)!r} is not JSON ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise InputError(f"{str(path)!r} must hold a JSON object; copy it again")
    return content


def describe_model(config: Mapping[str, Any], where: str) -> ModelArchitecture:
    """The model's sizes.

    Args:
        config: a config.json, in the spelling of transformers 4 or 5.
        where: names it in messages.

    Raises:
        InputError: the family is not supported, or a size is missing or impossible.
    """
    fields = _Sizes(config, where)
    family = next((name for name in _FAMILIES if name == config.get("model_type")), None)
    if family is None:
        raise fields.error(
            f"model_type={config.get('model_type')!r} is not supported; the families are "
            f"{', '.join(_FAMILIES)}"
        )
    hidden_size = fields.size("hidden_size")
    num_heads = fields.size("num_attention_heads")
    num_kv_heads = fields.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            f"num_key_value_heads={num_kv_heads} must divide num_attention_heads={num_heads}; "
            "mend it"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    is_plain = scaling.get("rope_type", scaling.get("type", "default")) == "default"
    is_glm = family in ("glm4", "glm4_moe")
    return ModelArchitecture(
        family=family,
        num_layers=fields.size("num_hidden_layers"),
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=fields.size("head_dim", 128 if family == "qwen3" else hidden_size // num_heads),
        ffn_hidden_size=fields.size("intermediate_size"),
        vocab_size=fields.size("vocab_size"),
        max_position_embeddings=fields.size("max_position_embeddings"),
        norm_epsilon=float(config.get("rms_norm_eps") or 1e-6),
        rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        rope_scaling=None if is_plain else scaling,
        tie_word_embeddings=bool(config.get("tie_word_embeddings") or False),
        qkv_bias=family == "qwen2" or (is_glm and bool(config.get("attention_bias"))),
        qk_layernorm=family in ("qwen3", "qwen3_moe") or bool(config.get("use_qk_norm")),
        initializer_range=float(config.get("initializer_range") or 0.02),
        eos_token_ids=(),
        torch_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        moe=_moe(fields, family) if FAMILY_TABLES[family].moe else None,
        mla=_mla(fields) if family in ("deepseek_v2", "deepseek_v3") else None,
        num_mtp_layers=int(config.get("num_nextn_predict_layers") or 0),
    )


def _moe(fields: "_Sizes", family: Family) -> MoeArchitecture | None:
    """None where every layer is dense."""
    num_layers = fields.size("num_hidden_layers")
    count = next(
        (n for n in ("num_experts", "num_local_experts", "n_routed_experts") if fields.get(n)), None
    )
    if count is None:
        return None
    ffn = "intermediate_size" if family == "mixtral" else "moe_intermediate_size"
    ffn_hidden_size = fields.size(ffn)
    first_dense = int(fields.get("first_k_dense_replace") or 0)
    dense = fields.get("mlp_only_layers") or ()
    # Qwen3 counts from the end of a period, DeepSeek from its start; both default to 1.
    step, freq = fields.size("decoder_sparse_step", 1), fields.size("moe_layer_freq", 1)
    layers = tuple(
        layer
        for layer in range(num_layers)
        if layer >= first_dense
        and layer not in dense
        and (layer + 1) % step == 0
        and layer % freq == 0
    )
    num_shared = int(fields.get("n_shared_experts") or 0)
    # DeepSeek-V2 chooses experts by their scores alone.
    has_bias = family in ("glm4_moe", "deepseek_v3")
    return MoeArchitecture(
        num_experts=fields.size(count),
        experts_per_token=fields.size("num_experts_per_tok"),
        ffn_hidden_size=ffn_hidden_size,
        normalize_topk=bool(fields.get("norm_topk_prob")) or family == "mixtral",
        layers=layers,
        shared_ffn_hidden_size=num_shared * ffn_hidden_size,
        has_expert_bias=has_bias,
    )


def _mla(fields: "_Sizes") -> MlaArchitecture:
    has_rank = fields.get("q_lora_rank") is not None
    return MlaArchitecture(
        q_lora_rank=fields.size("q_lora_rank") if has_rank else None,
        kv_lora_rank=fields.size("kv_lora_rank"),
        qk_nope_head_dim=fields.size("qk_nope_head_dim"),
        qk_rope_head_dim=fields.size("qk_rope_head_dim"),
        v_head_dim=fields.size("v_head_dim"),
    )


class _Sizes:
    """Positive integers of a config.json."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config = config
        self._where = where

    def get(self, field: str) -> Any:
        return self._config.get(field)

    def error(self, problem: str) -> InputError:
        return InputError(f"{self._where}: {problem}")

    def size(self, field: str, default: int | None = None) -> int:
        value = self._config.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"{field}={value!r} must be a positive integer; mend it")
        return value
