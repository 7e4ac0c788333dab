"""The production path on one GPU: NCCL, Transformer Engine's layers, bf16 with fp32 master weights.

The same claims as tests/dist makes on the CPU, with tolerances of the GPU's arithmetic.
"""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_p3o.architecture import read_architecture
from megatron_p3o.config import RunConfig
from megatron_p3o.parallel.layout import ParallelLayout
from megatron_p3o.parallel.setup import initialize, shut_down
from megatron_p3o.trainer.policy import Policy
from tests.dist.harness import next_rendezvous, spawn
from tests.dist.models import make_model, make_recording, replay_config
from tests.dist.test_checkpoint import save_while_training
from tests.dist.test_policy import TOKENS, sample
from tests.dist.test_router_replay import assert_replayed


def config_on_gpu(
    model: Path, precision: str, layout: dict | None = None, **train: object
) -> RunConfig:
    return replay_config(
        model,
        Path("unused"),
        steps=1,
        groups=1,
        group_size=2,
        precision={"trainer": precision},
        layout=layout or {},
        train=train,
    )


def score_update_export(
    config: RunConfig,
) -> tuple[list[torch.Tensor], float, dict[str, torch.Tensor], list[str]]:
    """Log-probs of TOKENS, gradient norm of one P3O update, weights before it, parameter names."""
    assert os.environ["WORLD_SIZE"] == "1"
    context = initialize(ParallelLayout(), seed=0)
    assert context.device.type == "cuda"
    policy = Policy(config, read_architecture(config.model.path), context)
    weights = {name: tensor.cpu().clone() for name, tensor in policy.named_tensors()}
    batch = policy.microbatches([sample(str(i), t[:1], t[1:]) for i, t in enumerate(TOKENS)])
    scores = policy.score(batch)
    metrics = policy.update(batch, policy.trust(batch, scores))
    logprobs = [score.logprobs.cpu() for score in scores]
    names = [name for name, _ in policy.model.named_weights()]
    shut_down()
    return logprobs, metrics["grad_norm"].value, weights, names


def score_and_step(configs: list[RunConfig]) -> list[tuple[dict[tuple[str, int], float], float]]:
    """For every configuration: this rank's log-probs by (sample, position), gradient norm."""
    results = []
    for config in configs:
        layout = ParallelLayout.for_world(config.layout, int(os.environ["WORLD_SIZE"]))
        context = initialize(layout, seed=0)
        policy = Policy(config, read_architecture(config.model.path), context)
        batch = policy.microbatches([sample(str(i), t[:1], t[1:]) for i, t in enumerate(TOKENS)])
        scores = policy.score(batch)
        metrics = policy.update(batch, policy.trust(batch, scores))
        logprobs = {
            microbatch.locate_token(i): float(score.logprobs[i])
            for microbatch, score in zip(batch, scores, strict=True)
            for i in range(microbatch.num_tokens)
        }
        results.append((logprobs, metrics["grad_norm"].value))
        shut_down()
        if config is not configs[-1]:
            next_rendezvous()
    return results


def assert_as_one_padded_rank(model_dir: Path, world_size: int, configs: list[RunConfig]) -> None:
    """Every configuration's log-probs and gradient norm, within bf16's rounding."""
    want = transformers_logprobs(model_dir).tolist()
    (((_, want_norm),),) = spawn(score_and_step, 1, [config_on_gpu(model_dir, "bf16")])
    ranks = spawn(score_and_step, world_size, configs, num_rendezvous=len(configs))
    for index, config in enumerate(configs):
        logprobs = {k: v for results in ranks for k, v in results[index][0].items()}
        ordered = [logprobs[key] for key in sorted(logprobs)]
        assert len(ordered) == len(want), config
        assert ordered == pytest.approx(want, abs=0.3), config
        for results in ranks:
            assert results[index][1] == pytest.approx(want_norm, rel=0.1), config


PACKING = {"packing": True, "max_tokens_per_microbatch": 16}


def test_packed_sequences(tmp_path: Path) -> None:
    model_dir = make_model(tmp_path / "model", "qwen3", tied=True)
    assert_as_one_padded_rank(model_dir, 1, [config_on_gpu(model_dir, "bf16", **PACKING)])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_sequence_and_context_parallel(tmp_path: Path) -> None:
    model_dir = make_model(tmp_path / "model", "qwen3", tied=True)
    layouts = ({"context": 2}, {"tensor": 2, "sequence_parallel": True})
    configs = [
        config_on_gpu(model_dir, "bf16", layout, **options)
        for layout in layouts
        for options in ({}, PACKING)
    ]
    assert_as_one_padded_rank(model_dir, 2, configs)


def test_fp32_has_no_packed_attention(tmp_path: Path) -> None:
    model_dir = make_model(tmp_path / "model", "qwen3", tied=True)
    with pytest.raises(AssertionError, match=r"train\.packing=true needs precision\.trainer=bf16"):
        spawn(score_and_step, 1, [config_on_gpu(model_dir, "fp32", **PACKING)])


def transformers_logprobs(model_dir: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    rows = []
    for tokens in TOKENS:
        with torch.no_grad():
            logp = torch.log_softmax(model(torch.tensor([tokens])).logits[0], dim=-1)
        rows.append(logp[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0])
    return torch.cat(rows)


EXPERTS = {"qwen3_moe": 0, "mixtral": 0, "glm4_moe": 1, "deepseek_v2": 1, "deepseek_v3": 1}
"""A layer that routes, of the families that have some."""
# Heads of a size that attention kernels take.
LATENT = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "head_dim": 64, "v_head_dim": 64}


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "glm4", "glm4_moe"]
)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-3), ("bf16", 0.3)])
def test_transformer_engine_model_scores_and_steps(
    family: str, precision: str, tolerance: float, tmp_path: Path
) -> None:
    model_dir = make_model(tmp_path / "model", family, tied=family != "qwen2")
    names = assert_scores_and_steps(model_dir, precision, tolerance)
    # Transformer Engine keeps the norm in front of a linear layer inside that layer.
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in names
    # And a layer's experts in grouped linear layers, one weight for each.
    grouped = f"decoder.layers.{EXPERTS.get(family, 0)}.mlp.experts.linear_fc1.weight3"
    assert (grouped in names) == (family in EXPERTS)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention(family: str, tmp_path: Path) -> None:
    model_dir = make_model(tmp_path / "model", family, tied=False, **LATENT)
    names = assert_scores_and_steps(model_dir, "bf16", tolerance=0.3)
    assert "decoder.layers.1.mlp.experts.linear_fc1.weight3" in names


def assert_scores_and_steps(model_dir: Path, precision: str, tolerance: float) -> list[str]:
    """Log-probs as transformers', a finite gradient, weights out as they went in; their names."""
    config = config_on_gpu(model_dir, precision)
    ((logprobs, grad_norm, weights, names),) = spawn(score_update_export, 1, config)
    error = (torch.cat(logprobs) - transformers_logprobs(model_dir)).abs().max()
    assert error < tolerance
    assert 0 < grad_norm < float("inf")
    for name, tensor in load_file(model_dir / "model.safetensors").items():
        is_half = precision == "bf16" and not name.endswith("e_score_correction_bias")
        assert torch.equal(weights[name], tensor.bfloat16() if is_half else tensor), name
    return names


def test_recorded_experts_are_replayed(tmp_path: Path) -> None:
    assert_replayed(tmp_path, normalize=True, tolerance=2e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    model_dir = make_model(tmp_path / "model", "llama", tied=False)
    recording = make_recording(
        tmp_path / "samples.jsonl", model_dir, steps=2, groups=2, group_size=2, noise=0.2
    )
    config = replay_config(
        model_dir,
        recording,
        steps=2,
        groups=2,
        group_size=2,
        run={"dir": str(tmp_path / "run")},
        layout={"data": 2},
    )
    spawn(save_while_training, 2, config, num_rendezvous=2)
