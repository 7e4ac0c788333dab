"""The configuration of a Megatron checkpoint: config.json carried beside it, or its arguments.

A checkpoint that this tool writes carries the model's files in `hf/`, so that config.json comes
back as it was. One that a run of this project wrote lies in a run dir, whose config.yaml names the
model. Any other must have Megatron-LM's arguments in it, from which a config.json is made.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron_p3o.architecture import ModelArchitecture
from megatron_p3o.errors import InputError
from megatron_p3o.weights.resharding.describe import read_config
from megatron_p3o.weights.resharding.target import TargetLayout

FILES_DIR = "hf"
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
_BEYOND_ARGUMENTS = (
    "multi_latent_attention",
    "mtp_num_layers",
    "moe_shared_expert_intermediate_size",
    "moe_router_enable_expert_bias",
)


def find_config(
    directory: Path, config_dir: Path | None, arguments: Any
) -> tuple[dict[str, Any], Path | None]:
    """The model's config.json and the directory of its tokenizer files.

    Args:
        directory: of the checkpoint.
        config_dir: what the user named.
        arguments: Megatron-LM's `args` in the checkpoint, if any.

    Raises:
        InputError: nothing says what model it is.
    """
    candidates = [config_dir] if config_dir is not None else _candidates(directory)
    for candidate in candidates:
        if config_dir is not None or (candidate / "config.json").is_file():
            return read_config(candidate), candidate
    if isinstance(arguments, Namespace):
        return config_from_arguments(vars(arguments), str(directory)), None
    raise InputError(
        f"{str(directory)!r} does not say what model it holds (no {FILES_DIR}/config.json, no run "
        "dir around it, no Megatron-LM arguments in it); name a directory with the model's "
        "config.json with --config"
    )


def _candidates(directory: Path) -> list[Path]:
    found = [directory / FILES_DIR, directory.parent / FILES_DIR]
    run_config = directory.parent.parent / "config.yaml"
    if run_config.is_file():
        content = yaml.safe_load(run_config.read_text(encoding="utf-8"))
        model = content.get("model", {}).get("path") if isinstance(content, dict) else None
        if isinstance(model, str) and not (Path(model) / "config.json").is_file():
            raise InputError(
                f"{str(run_config)!r} names model.path={model!r}, which is not found from here; "
                "start in the directory where the run was started, or name the model's directory "
                "with --config"
            )
        if isinstance(model, str):
            found.append(Path(model))
    return found


def arguments_from_config(
    config: Mapping[str, Any], architecture: ModelArchitecture, layout: TargetLayout
) -> Namespace:
    """Megatron-LM's arguments for a model, as it stores them in a checkpoint (`args`).

    Names as in megatron/training/arguments.py. A rope scaling that Megatron-LM's arguments cannot
    express is left out; config.json is carried beside the checkpoint.
    """
    scaling = architecture.rope_scaling or {}
    is_llama3 = scaling.get("rope_type", scaling.get("type")) == "llama3"
    return Namespace(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        group_query_attention=True,
        num_query_groups=architecture.num_key_value_heads,
        kv_channels=architecture.head_dim,
        vocab_size=architecture.vocab_size,
        padded_vocab_size=layout.padded_vocab(architecture.vocab_size),
        make_vocab_size_divisible_by=layout.vocab_divisible_by,
        max_position_embeddings=architecture.max_position_embeddings,
        normalization="RMSNorm",
        norm_epsilon=architecture.norm_epsilon,
        swiglu=True,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_layernorm,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
        rotary_percent=float(config.get("partial_rotary_factor") or 1.0),
        use_rope_scaling=is_llama3,
        rope_scaling_factor=float(scaling.get("factor", 8.0)) if is_llama3 else 8.0,
        untie_embeddings_and_output_weights=not architecture.tie_word_embeddings,
        init_method_std=architecture.initializer_range,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=(
            layout.virtual_pipeline if layout.virtual_pipeline > 1 else None
        ),
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **_expert_arguments(architecture),
        multi_latent_attention=architecture.mla is not None,
        mtp_num_layers=architecture.num_mtp_layers or None,
    )


def _expert_arguments(architecture: ModelArchitecture) -> dict[str, Any]:
    moe = architecture.moe
    if moe is None:
        return {"num_experts": None}
    pattern = [int(layer in moe.layers) for layer in range(architecture.num_layers)]
    return {
        "num_experts": moe.num_experts,
        "moe_router_topk": moe.experts_per_token,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        # A softmax over the chosen experts is the softmax over all, normalised over the chosen.
        "moe_router_pre_softmax": not moe.normalize_topk,
        "moe_layer_freq": 1 if all(pattern) else pattern,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_router_enable_expert_bias": moe.has_expert_bias,
    }


def config_from_arguments(arguments: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A config.json for Megatron-LM's arguments: the inverse of `arguments_from_config`.

    Raises:
        InputError: they describe a model that is not in the tables, or lack a size.
    """

    def get(name: str) -> Any:
        if name not in arguments:
            raise InputError(
                f"{where!r}: its Megatron-LM arguments lack {name}; name a directory with the "
                "model's config.json with --config"
            )
        return arguments[name]

    _check_arguments(arguments, get, where)
    num_experts = arguments.get("num_experts")
    family = "llama"
    if num_experts:
        family = "qwen3_moe" if arguments.get("qk_layernorm") else "mixtral"
    elif arguments.get("qk_layernorm"):
        family = "qwen3"
    elif arguments.get("add_qkv_bias"):
        family = "qwen2"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(get("rotary_base"))}
    if arguments.get("use_rope_scaling"):
        rope |= {"rope_type": "llama3", "factor": float(get("rope_scaling_factor")), **_LLAMA3}
    heads = get("num_attention_heads")
    groups = get("num_query_groups") if arguments.get("group_query_attention") else heads
    experts = _expert_fields(arguments, family) if num_experts else {}
    return {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "hidden_act": "silu",
        "num_hidden_layers": get("num_layers"),
        "hidden_size": get("hidden_size"),
        "intermediate_size": get("ffn_hidden_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": get("kv_channels"),
        "vocab_size": get("vocab_size"),
        "max_position_embeddings": get("max_position_embeddings"),
        "rms_norm_eps": float(get("norm_epsilon")),
        "rope_parameters": rope,
        "tie_word_embeddings": not get("untie_embeddings_and_output_weights"),
        "initializer_range": float(arguments.get("init_method_std", 0.02)),
        **experts,
    }


def _check_arguments(arguments: Mapping[str, Any], get: Callable[[str], Any], where: str) -> None:
    """Refuse models that are not in the tables, or that arguments do not determine."""
    fixed = {
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "position_embedding_type": "rope",
    }
    for name, value in fixed.items():
        if get(name) != value:
            raise InputError(
                f"{where!r}: {name}={get(name)!r} in its Megatron-LM arguments is not a model of "
                f"the tables, which have {value!r}; name a directory with the model's config.json "
                "with --config"
            )
    for name in _BEYOND_ARGUMENTS:
        if arguments.get(name):
            raise InputError(
                f"{where!r}: {name}={arguments[name]!r} in its Megatron-LM arguments leaves fields "
                "of config.json open; name a directory with the model's config.json with --config"
            )


def _expert_fields(arguments: Mapping[str, Any], family: str) -> dict[str, Any]:
    """What config.json says of experts."""
    ffn = arguments.get("moe_ffn_hidden_size") or arguments.get("ffn_hidden_size")
    fields = {"num_experts_per_tok": arguments.get("moe_router_topk")}
    if family == "mixtral":
        return {**fields, "num_local_experts": arguments["num_experts"], "intermediate_size": ffn}
    frequency = arguments.get("moe_layer_freq") or 1
    num_layers = arguments["num_layers"]
    if isinstance(frequency, int):
        frequency = [int(layer % frequency == 0) for layer in range(num_layers)]
    return {
        **fields,
        "num_experts": arguments["num_experts"],
        "moe_intermediate_size": ffn,
        "norm_topk_prob": not arguments.get("moe_router_pre_softmax"),
        "mlp_only_layers": [layer for layer in range(num_layers) if not frequency[layer]],
        "decoder_sparse_step": 1,
    }
