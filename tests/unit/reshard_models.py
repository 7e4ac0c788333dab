"""Tiny random Hugging Face models of every family that can be resharded."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
)

VOCAB = 101  # prime, so that every layout pads it

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DEEPSEEK = {
    **_EXPERTS,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
_FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4},
    "glm4": {"pad_token_id": 0, "attention_bias": True},
    "glm4_moe": {
        **_EXPERTS,
        "pad_token_id": 0,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v2": {**_DEEPSEEK, "q_lora_rank": None, "n_shared_experts": 2},
    "deepseek_v3": {**_DEEPSEEK, "q_lora_rank": 24, "n_shared_experts": 1},
}


def tiny_config(family: str, *, tied: bool = False, **changes: Any) -> PretrainedConfig:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return AutoConfig.for_model(family, **{**sizes, **_FAMILY_SIZES.get(family, {}), **changes})


def make_model(
    directory: Path,
    family: str,
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    shard_size: str = "1GB",
    **changes: Any,
) -> Path:
    """Save a random model with every parameter different from its initial ones and zeros."""
    torch.manual_seed(0)
    config = tiny_config(family, tied=tied, **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape))
        for buffer_name, buffer in model.named_buffers():
            if "correction_bias" in buffer_name:
                buffer.copy_(torch.randn(buffer.shape))
    model.to(dtype).save_pretrained(directory, max_shard_size=shard_size)
    (directory / "tokenizer.json").write_text('{"carried": true}')
    return directory
