"""Reads the rotary position embedding of a config.json."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_p3o.architecture.fields import Fields
from megatron_p3o.architecture.model import Family

# Megatron's RotaryEmbedding._apply_scaling fixes these and takes only the factor.
_MEGATRON_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_PARTIAL: Mapping[Family, float] = {"glm4": 0.5, "glm4_moe": 0.5}
"""What transformers takes where config.json is silent."""


class Rope(NamedTuple):
    """See `ModelArchitecture`."""

    theta: float
    scaling: Mapping[str, Any] | None
    fraction: float


def read_rope(config: Fields, family: Family) -> Rope:
    """Both spellings; where both are there, in transformers' order of precedence.

    Raises:
        InputError: a kind of rope or a field of it that is not computed here.
    """
    legacy, present = config.get("rope_scaling"), config.get("rope_parameters")
    values = {"rope_theta": config.get("rope_theta"), **(legacy or present or {})}
    if values["rope_theta"] is None:
        values["rope_theta"] = 10000.0
    rope = Fields(config.model_dir, values)
    theta = rope.positive_float("rope_theta")
    rope_type, legacy_type = rope.get("rope_type"), rope.get("type")
    rope_type = rope_type or legacy_type or "default"
    is_latent = family in ("deepseek_v2", "deepseek_v3")
    scaling = None
    if rope_type == "llama3" and not is_latent:
        scaling = _llama3(rope)
    elif rope_type == "yarn" and is_latent:
        scaling = _yarn(rope)
    elif rope_type != "default":
        other = "yarn" if is_latent else "llama3"
        raise rope.error(f"rope_type={rope_type!r} is not supported; use default or {other}")
    fraction = 1.0
    if family in _PARTIAL:
        fraction = rope.positive_float(
            "partial_rotary_factor",
            default=config.positive_float("partial_rotary_factor", default=_PARTIAL[family]),
        )
    for field, value in rope.unread().items():
        raise rope.error(
            f"rope field {field}={value!r} is not known for rope_type={rope_type!r}; use a model "
            "without it"
        )
    return Rope(theta, scaling, fraction)


def _llama3(rope: Fields) -> dict[str, Any]:
    for field, value in _MEGATRON_LLAMA3_ROPE.items():
        if rope.get(field) != value:
            raise rope.error(
                f"rope field {field}={rope.get(field)!r} is not supported, Megatron's llama3 "
                f"rope has {value!r}; use a model with that value"
            )
    return {"rope_type": "llama3", "factor": rope.positive_float("factor")}


def _yarn(rope: Fields) -> dict[str, Any]:
    """transformers' `_compute_yarn_parameters`, with the two mscales of DeepSeek or neither."""
    scaling = {
        "rope_type": "yarn",
        "factor": rope.positive_float("factor"),
        "original_max_position_embeddings": rope.positive_int("original_max_position_embeddings"),
        "beta_fast": rope.positive_float("beta_fast", default=32.0),
        "beta_slow": rope.positive_float("beta_slow", default=1.0),
    }
    mscales = [rope.get(name) for name in ("mscale", "mscale_all_dim")]
    if mscales == [None, None]:
        return {**scaling, "mscale": 1.0, "mscale_all_dim": 0.0}
    return {
        **scaling,
        "mscale": rope.positive_float("mscale"),
        "mscale_all_dim": rope.positive_float("mscale_all_dim"),
    }
