"""Tiny random models and recorded batches, made once per test session on the parent's side."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from megatron_p3o.config import RunConfig, parse_config
from megatron_p3o.types import RoutedExperts, Sample

VOCAB = 101  # prime, so that every tensor-parallel size needs padding


_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED_EXPERTS = {**_EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1}
_LATENT = {
    **_SHARED_EXPERTS,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
_FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "norm_topk_prob": True},
    "glm4": {"pad_token_id": 0, "attention_bias": True},
    "glm4_moe": {
        **_SHARED_EXPERTS,
        "pad_token_id": 0,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v2": {
        **_LATENT,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.0,
    },
    "deepseek_v3": {
        **_LATENT,
        "q_lora_rank": 24,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 0.8,
            "mscale_all_dim": 0.6,
        },
    },
}


def tiny_config(family: str, *, tied: bool, **changes: object) -> PretrainedConfig:
    common: dict[str, object] = {
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
        # A large spread, so that logits and gradients are of order one and errors show.
        "initializer_range": 0.15,
    }
    fields = {**common, **_FAMILY_FIELDS.get(family, {}), **changes}
    return AutoConfig.for_model(family, **fields)


def make_model(
    directory: Path, family: str, *, tied: bool, seed: int = 0, **changes: object
) -> Path:
    """A random Hugging Face checkpoint whose norms and biases are not all ones and zeros.

    Args:
        directory: where it is saved.
        family: as `ModelArchitecture.family`.
        tied: whether embedding and output weight are one.
        seed: of the weights.
        changes: fields of the Hugging Face configuration.
    """
    torch.manual_seed(seed)
    config = tiny_config(family, tied=tied, **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape))
    model.save_pretrained(directory)
    return directory


def make_recording(
    path: Path,
    model_dir: Path,
    *,
    steps: int,
    groups: int,
    group_size: int,
    noise: float,
    routed: tuple[int, int, int] | None = None,
) -> Path:
    """samples.jsonl of ragged random samples; rollout log-probs are the model's plus noise.

    `routed` (layers that route, experts per token, experts) adds random choices of experts.
    """
    generator = torch.Generator().manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    with path.open("w") as file:
        for step in range(steps):
            for group in range(groups):
                prompt = torch.randint(2, VOCAB, (draw(2, 7),), generator=generator).tolist()
                for index in range(group_size):
                    response = torch.randint(2, VOCAB, (draw(1, 9),), generator=generator).tolist()
                    experts = None
                    if routed is not None:
                        num_inputs = len(prompt) + len(response) - 1
                        experts = random_experts(num_inputs, *routed, generator)
                    with torch.no_grad(), forced_experts(model, experts):
                        logits = model(torch.tensor([[*prompt, *response[:-1]]])).logits[0]
                    logp = torch.log_softmax(logits, -1)[len(prompt) - 1 :]
                    logp = logp.gather(1, torch.tensor(response)[:, None])[:, 0]
                    logp = logp + noise * torch.randn(logp.shape, generator=generator)
                    sample = Sample(
                        prompt_id=f"{step}-{group}",
                        sample_index=index,
                        prompt_ids=tuple(prompt),
                        response_ids=tuple(response),
                        rollout_logprobs=tuple(logp.tolist()),
                        finish_reason="stop",
                        weight_version_min=step,
                        weight_version_max=step,
                        reward=float(draw(0, 4)),
                        routed_experts=experts,
                    )
                    file.write(json.dumps({"step": step, **sample.to_json()}) + "\n")
    return path


def random_experts(
    num_tokens: int, num_layers: int, per_token: int, num_experts: int, generator: torch.Generator
) -> RoutedExperts:
    """Different experts for every token and layer, all choices alike likely."""
    order = torch.rand(num_tokens, num_layers, num_experts, generator=generator).argsort(dim=-1)
    return RoutedExperts.from_tensor(order[..., :per_token])


@contextmanager
def forced_experts(model: Any, experts: RoutedExperts | None) -> Iterator[list[Tensor]]:
    """Send the tokens of one sequence through transformers' Qwen3-MoE to given experts.

    Gives a list to which every layer adds which of its choices [N, K] are not its own.
    """
    differing: list[Tensor] = []
    if experts is None:
        yield differing
        return
    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    chosen_NMK = experts.tensor().long()
    with ExitStack() as hooks:
        for place, router in enumerate(routers):

            def route(
                module: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor], place: int = place
            ) -> tuple[Tensor, Tensor, Tensor]:
                logits, _, own = output
                chosen = chosen_NMK[:, place]
                weights = torch.softmax(logits.double(), dim=-1).gather(1, chosen)
                if module.norm_topk_prob:
                    weights = weights / weights.sum(dim=-1, keepdim=True)
                differing.append((chosen[:, :, None] != own[:, None, :]).all(dim=-1))
                return logits, weights.to(logits.dtype), chosen

            hooks.callback(router.register_forward_hook(route).remove)
        yield differing


def replay_config(
    model_dir: Path, recording: Path, *, steps: int, groups: int, group_size: int, **sections: dict
) -> RunConfig:
    """A run on a recording; `sections` override or extend fields."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"dir": "unused", "record": False},
        "model": {"path": str(model_dir)},
        "data": {"source": "generator", "generator": "arithmetic"},
        "train": {"steps": steps, "prompts_per_step": groups, "samples_per_prompt": group_size},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1},
        "rollout": {"engine": "replay", "replay_path": str(recording)},
    }
    for name, fields in sections.items():
        tree[name] = {**tree.get(name, {}), **fields}
    return parse_config(tree)
