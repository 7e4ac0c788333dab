"""Mixtures of experts against transformers: logits, weights out, router metrics, auxiliary loss."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_p3o.config import RunConfig
from megatron_p3o.parallel.router import RouterStats
from megatron_p3o.parallel.setup import shut_down
from tests.dist.harness import next_rendezvous, spawn
from tests.dist.models import make_model, make_recording, replay_config
from tests.dist.test_invariance import run_all
from tests.dist.test_policy import (
    TOKENS,
    assert_logits,
    config_for,
    logits_and_weights,
    make_policy,
    sample,
)

SEQUENCE = {"tensor": 2, "sequence_parallel": True}


def test_logits_equal_transformers(tmp_path: Path) -> None:
    variants = [
        {"norm_topk_prob": True},
        {"norm_topk_prob": False},
        {"norm_topk_prob": False, "num_experts_per_tok": 1},
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [0, 3], "num_experts": 8, "num_experts_per_tok": 3},
    ]
    models = [
        make_model(tmp_path / str(index), "qwen3_moe", tied=index == 0, **changes)
        for index, changes in enumerate(variants)
    ]
    configs = [config_for(model, {}) for model in models]
    (results,) = spawn(logits_and_weights, 1, configs, num_rendezvous=len(configs))
    for model, (logits, _) in zip(models, results, strict=True):
        assert logits is not None
        assert_logits(logits, str(model))


def exported_and_routed(
    configs: list[RunConfig],
) -> list[tuple[dict[str, torch.Tensor], RouterStats]]:
    """Weights by Hugging Face name, and the router statistics of TOKENS, per configuration."""
    results = []
    for config in configs:
        policy, _ = make_policy(config)
        weights = {name: tensor.clone() for name, tensor in policy.named_tensors()}
        policy.score(
            policy.microbatches([sample(str(i), t[:1], t[1:]) for i, t in enumerate(TOKENS)])
        )
        stats = policy._runner.routers.stats()
        assert stats is not None
        results.append((weights, stats))
        shut_down()
        if config is not configs[-1]:
            next_rendezvous()
    return results


def router_oracle(model_dir: Path, *, experts: int, per_token: int) -> RouterStats:
    """The statistics of TOKENS from transformers' router logits, in float64."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    by_layer: dict[int, list[torch.Tensor]] = {}
    for tokens in TOKENS:  # of one prompt token each: every input position predicts a response
        with torch.no_grad():
            output = model(torch.tensor([tokens[:-1]]), output_router_logits=True)
        for layer, logits in enumerate(output.router_logits):
            by_layer.setdefault(layer, []).append(logits.double())
    imbalances, balances, entropies = [], [], []
    for parts in by_layer.values():
        p = torch.softmax(torch.cat(parts), dim=-1)
        load = torch.bincount(p.topk(per_token).indices.flatten(), minlength=experts).double()
        imbalances.append(float(load.max() / load.mean()))
        balances.append(float(experts * (load / load.sum() * p.mean(0)).sum()))
        entropies.append(float(-(p * p.log()).sum(-1).mean()))
    count = len(by_layer)
    return RouterStats(
        sum(imbalances) / count, max(imbalances), sum(balances) / count, sum(entropies) / count
    )


def test_weights_come_back_bitwise_and_routers_are_measured(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3_moe", tied=False)
    stored = load_file(model / "model.safetensors")
    want = router_oracle(model, experts=4, per_token=2)
    assert want.load_max_over_mean_worst > 1.2
    by_world = {
        2: [
            {"data": 2, "expert": 2},
            {**SEQUENCE, "expert_tensor": 2},
            {"pipeline": 2, "virtual_pipeline": 2},
        ],
        4: [{"pipeline": 2, **SEQUENCE, "expert": 2}],
    }
    for world_size, layouts in by_world.items():
        configs = [config_for(model, layout) for layout in layouts]
        ranks = spawn(exported_and_routed, world_size, configs, num_rendezvous=len(configs))
        for results in ranks:
            for config, (weights, stats) in zip(configs, results, strict=True):
                assert weights.keys() == stored.keys()
                for name, tensor in stored.items():
                    assert torch.equal(weights[name], tensor), (config.layout, name)
                assert stats == pytest.approx(want, rel=1e-5), config.layout


def test_the_auxiliary_loss_evens_out_the_experts(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3_moe", tied=False)
    sizes = {"steps": 8, "groups": 2, "group_size": 4}
    recording = make_recording(tmp_path / "samples.jsonl", model, **sizes, noise=0.1)
    configs = [
        replay_config(
            model,
            recording,
            **sizes,
            model={"path": str(model), "moe_aux_loss_coefficient": coefficient},
            optimizer={"lr": 1e-2},
        )
        for coefficient in (0.0, 10.0)
    ]
    ((without, _), (balanced, _)) = run_all(1, configs)[0]
    key = "router/balance_loss"
    # The first batch is scored before any update; 1 would be perfect balance.
    assert balanced[0][key] == without[0][key] > 1.03
    assert balanced[-1][key] - 1 < 0.7 * (without[-1][key] - 1)
