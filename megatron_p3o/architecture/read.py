"""Reads a Hugging Face model directory strictly.

Every field of `config.json` is either read into `ModelArchitecture`, or must hold the only value
for which this code computes the same, or is known not to matter; any other field is refused by
name. An ignored rope or attention field would train a different model without a sign of it.

Both spellings are read: transformers 5 (`rope_parameters`, `dtype`) and transformers 4
(`rope_theta`, `rope_scaling`, `torch_dtype`).
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_p3o.architecture.fields import Fields
from megatron_p3o.architecture.known import FAMILY_OF, check_other_fields
from megatron_p3o.architecture.model import Family, MlaArchitecture, ModelArchitecture
from megatron_p3o.architecture.moe import read_moe
from megatron_p3o.architecture.rope import read_rope
from megatron_p3o.model_files import model_error, read_json, read_weight_headers

_LATENT: tuple[Family, ...] = ("deepseek_v2", "deepseek_v3")
_FURTHER_TOKENS: tuple[Family, ...] = ("deepseek_v3", "glm4_moe")
# What transformers takes where config.json is silent; elsewhere hidden_size / heads.
_DEFAULT_HEAD_DIM: Mapping[Family, int] = {"qwen3": 128, "glm4": 128, "glm4_moe": 128}


def read_architecture(model_dir: str | Path, *, with_weights: bool = True) -> ModelArchitecture:
    """Read and check a Hugging Face model directory: its configuration and its weight files.

    Args:
        model_dir: the directory.
        with_weights: False reads config.json alone; weight files need not be there.

    Raises:
        InputError: the directory, config.json or weights are missing or incomplete, the
            architecture is not supported, or a field asks for a computation not built here.
    """
    model_dir = Path(model_dir)
    if not model_dir.is_dir():
        raise model_error(model_dir, "no such directory; give a Hugging Face model directory")
    config = Fields(model_dir, read_json(model_dir, "config.json"))
    family = _family(config)
    names: list[str] = []
    if with_weights:
        names = [name for header in read_weight_headers(model_dir).values() for name in header]

    hidden_size = config.positive_int("hidden_size")
    num_layers = config.positive_int("num_hidden_layers")
    num_heads = config.positive_int("num_attention_heads")
    num_kv_heads = config.positive_int("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise config.error(
            f"num_key_value_heads={num_kv_heads} must divide num_attention_heads={num_heads}; "
            "mend config.json"
        )
    if family in _FURTHER_TOKENS:
        _check_no_further_tokens(config, num_layers, names)
    rope = read_rope(config, family)
    mla = _mla(config) if family in _LATENT else None
    head_dim = config.positive_int(
        "head_dim", default=_DEFAULT_HEAD_DIM.get(family, hidden_size // num_heads)
    )
    architecture = ModelArchitecture(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_hidden_size=config.positive_int("intermediate_size"),
        vocab_size=config.positive_int("vocab_size"),
        max_position_embeddings=config.positive_int("max_position_embeddings"),
        norm_epsilon=config.positive_float("rms_norm_eps"),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rotary_fraction=rope.fraction,
        rotary_interleaved=family == "glm4",
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        qkv_bias=_has_qkv_bias(config, family),
        qk_layernorm=family in ("qwen3", "qwen3_moe")
        or (family == "glm4_moe" and config.flag("use_qk_norm")),
        has_post_norms=family == "glm4",
        initializer_range=config.positive_float("initializer_range", default=0.02),
        eos_token_ids=_eos_token_ids(config),
        torch_dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
        moe=read_moe(config, family, num_layers),
        mla=mla,
    )
    check_other_fields(config, family)
    return architecture


def _family(config: Fields) -> Family:
    names, model_type = config.get("architectures"), config.get("model_type")
    for name, family in FAMILY_OF.items():
        if names in ([name], None) and model_type == family:
            return family
    raise config.error(
        f"architectures={names!r} with model_type={model_type!r} is not supported; use a model of "
        f"{' or '.join(FAMILY_OF)}"
    )


def _has_qkv_bias(config: Fields, family: Family) -> bool:
    # Elsewhere attention_bias must be false: it would put a bias on the output projection too.
    return family == "qwen2" or (family in ("glm4", "glm4_moe") and config.flag("attention_bias"))


def _mla(config: Fields) -> MlaArchitecture:
    has_rank = config.get("q_lora_rank") is not None
    mla = MlaArchitecture(
        q_lora_rank=config.positive_int("q_lora_rank") if has_rank else None,
        kv_lora_rank=config.positive_int("kv_lora_rank"),
        qk_nope_head_dim=config.positive_int("qk_nope_head_dim"),
        qk_rope_head_dim=config.positive_int("qk_rope_head_dim"),
        v_head_dim=config.positive_int("v_head_dim"),
    )
    config.only("qk_head_dim", mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    config.only("head_dim", mla.qk_rope_head_dim)
    # transformers' norms of the latents have this epsilon, whatever the others have.
    config.only("rms_norm_eps", 1e-6)
    config.only("num_key_value_heads", config.get("num_attention_heads"))
    return mla


def _check_no_further_tokens(config: Fields, num_layers: int, names: Iterable[str]) -> None:
    """The layer that predicts further tokens is not built, so its weights would be lost."""
    config.count("num_nextn_predict_layers")
    prefix = f"model.layers.{num_layers}."
    if any(name.startswith(prefix) for name in names):
        raise config.error(
            f"the weights hold {prefix}*, a layer that predicts further tokens, which is not "
            "trained and would be missing from what is exported; remove its tensors and set "
            "num_nextn_predict_layers=0"
        )


def _eos_token_ids(config: Fields) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    if (config.model_dir / "generation_config.json").is_file():
        generation = read_json(config.model_dir, "generation_config.json")
        if generation.get("eos_token_id") is not None:
            value = generation["eos_token_id"]
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in ids):
        raise config.error(f"eos_token_id={value!r} must be an integer or a list of them; mend it")
    return tuple(ids)
