"""Which families can be trained, and the fields of a config.json that need not be read."""

from collections.abc import Mapping
from typing import Any

from megatron_p3o.architecture.fields import Fields
from megatron_p3o.architecture.model import Family

FAMILY_OF: Mapping[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}
"""By transformers' name of the model class."""

# Fields that change the computation, with the values under which it is the one computed here.
# attention_bias: Hugging Face then also puts a bias on the output projection, which Megatron has
# only together with biases in the MLP.
_FIXED_ANYWHERE: Mapping[str, tuple[Any, ...]] = {
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
_FIXED: Mapping[Family, Mapping[str, tuple[Any, ...]]] = {
    "mistral": {"sliding_window": (None,)},
    "mixtral": {"sliding_window": (None,), "router_jitter_noise": (0.0, None)},
    "deepseek_v2": {"scoring_func": ("softmax",), "moe_layer_freq": (1,)},
    "deepseek_v3": {
        "rope_interleave": (True,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
}

# sliding_window and max_window_layers are unused while use_sliding_window is false. The weight of
# the load-balancing loss belongs to pre-training; ours is model.moe_aux_loss_coefficient.
_WINDOW = frozenset({"sliding_window", "max_window_layers"})
_BALANCE = frozenset({"output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux"})
# auto_map names code of the model's author, which is never run; ep_size is the author's layout.
_DEEPSEEK = _BALANCE | {"auto_map", "ep_size"}
_IRRELEVANT: Mapping[Family, frozenset[str]] = {
    "llama": frozenset({"is_llama_config"}),
    "qwen2": _WINDOW,
    "qwen3": _WINDOW,
    "qwen3_moe": _WINDOW | _BALANCE,
    "mixtral": _BALANCE,
    "glm4_moe": _BALANCE,
    # With the greedy method no groups are formed.
    "deepseek_v2": _DEEPSEEK | {"n_group", "topk_group"},
    "deepseek_v3": _DEEPSEEK,
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


def check_other_fields(config: Fields, family: Family) -> None:
    """Refuse a computation that no field of `ModelArchitecture` expresses.

    Raises:
        InputError: a field that was not read is not known, or has another than its one value.
    """
    irrelevant = _IRRELEVANT_ANYWHERE | _IRRELEVANT.get(family, frozenset())
    fixed = {**_FIXED_ANYWHERE, **_FIXED.get(family, {})}
    for field, value in config.unread().items():
        if field in irrelevant:
            continue
        if field == "layer_types" and set(value or ()) <= {"full_attention"}:
            continue
        if field not in fixed:
            raise config.error(
                f"{field}={value!r} is not known here and may change the computation; use a "
                "model without it"
            )
        if value not in fixed[field]:
            raise config.error(
                f"{field}={value!r} is not supported, it must be {fixed[field][0]!r}; use "
                "a model with that value"
            )
