"""Small models with numbers that can be added up by hand, and runs on them."""

import json
from pathlib import Path
from typing import Any

from megatron_p3o.architecture import ModelArchitecture, read_architecture
from megatron_p3o.config import RunConfig, parse_config

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"

_COMMON: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
DENSE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_COMMON}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    **_COMMON,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "norm_topk_prob": True,
}


def model_dir(directory: Path, fields: dict[str, Any], **changes: Any) -> Path:
    """A directory with config.json alone."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**fields, **changes}))
    return directory


def architecture(directory: Path, fields: dict[str, Any], **changes: Any) -> ModelArchitecture:
    return read_architecture(model_dir(directory, fields, **changes), with_weights=False)


def run_config(model: Path, **sections: dict[str, Any]) -> RunConfig:
    """Prompts of 5 and responses of 4 tokens: 8 enter the model. 4 x 4 sequences a step."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"dir": "unused"},
        "model": {"path": str(model)},
        "data": {"source": "generator", "generator": "arithmetic", "max_prompt_tokens": 5},
        "sampling": {"max_new_tokens": 4},
        "train": {
            "steps": 10,
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "microbatch_size": 2,
        },
        "precision": {"trainer": "bf16", "rollout": "bf16"},
    }
    for name, fields in sections.items():
        tree[name] = {**tree.get(name, {}), **fields}
    return parse_config(tree)


SERVERS: dict[str, Any] = {"engine": "sglang", "launch": {"replicas": 2}}
