"""Tiny random Hugging Face models of every family that can be resharded."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 101  # prime, so that every layout pads it


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
    classes: dict[str, type[PretrainedConfig]] = {
        "llama": LlamaConfig,
        "mistral": MistralConfig,
        "qwen2": Qwen2Config,
        "qwen3": Qwen3Config,
    }
    return classes[family](**{**sizes, **changes})


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
