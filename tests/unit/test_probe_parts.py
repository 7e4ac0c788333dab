"""Which weights, inputs and layers a part of a model has, and that only those are rounded."""

from functools import reduce
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megatron_p3o.architecture import read_architecture
from megatron_p3o.config import PrecisionSection
from megatron_p3o.numerics import E4M3
from megatron_p3o.probe.parts import NOTHING, Ablation, RoundedParts, ablations
from megatron_p3o.probe.precisions import parse_precision
from megatron_p3o.rollout import ServedNumerics
from megatron_p3o.rollout.emulation import round_inputs
from megatron_p3o.weights import param_rows
from tests.unit.reshard_models import make_model

FP8 = PrecisionSection(rollout="fp8-block")
KINDS = ("parts", "layers")


def rows_of(model_dir: Path, precision: str, kinds: tuple[str, ...] = KINDS) -> list[Ablation]:
    rows = param_rows(read_architecture(model_dir))
    return [*ablations(rows, parse_precision(precision).section, kinds)]


def named(rows: list[Ablation]) -> dict[str, RoundedParts]:
    return {row.name: row.parts for row in rows}


def union(parts: list[RoundedParts]) -> RoundedParts:
    return reduce(
        lambda one, other: RoundedParts(
            one.weights | other.weights, one.inputs | other.inputs, one.kv_layers | other.kv_layers
        ),
        parts,
    )


def test_parts_of_a_dense_model(tiny_model_dir: Path) -> None:
    rows = rows_of(tiny_model_dir, "fp8-block")
    parts = named(rows)
    assert len(parts) == len(rows) == 1 + 9 + 6 + 4
    attention = {
        f"model.layers.{layer}.self_attn.{p}_proj.weight" for layer in range(4) for p in "qkv"
    }
    assert parts["q, k and v"] == RoundedParts(frozenset(attention), frozenset(attention))
    down = {f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(4)}
    assert parts["down"].weights == down
    full = parts["everything"]
    assert len(full.weights) == 4 * 7 and full.inputs == full.weights and not full.kv_layers
    assert parts["weights"] == RoundedParts(weights=full.weights)
    assert parts["activations"] == RoundedParts(inputs=full.inputs)
    assert parts["KV cache in e4m3 (not in everything)"] == RoundedParts(
        kv_layers=frozenset(range(4))
    )
    assert parts["last layer"] == parts["layer 3"]
    assert parts["all but down"].weights == full.weights - down
    assert union([parts[f"layer {layer}"] for layer in range(4)]) == full
    projections = ("q, k and v", "o", "gate and up", "down")
    assert union([parts[name] for name in projections]) == full
    for name in projections:
        assert union([parts[name], parts[f"all but {name}"]]) == full


def test_the_kv_cache_is_a_part_where_it_is_served_rounded(tiny_model_dir: Path) -> None:
    parts = named(rows_of(tiny_model_dir, "fp8-block+kv-e5m2"))
    assert parts["everything"].kv_layers == set(range(4))
    assert parts["KV cache"] == RoundedParts(kv_layers=frozenset(range(4)))
    assert not parts["all but KV cache"].kv_layers
    assert parts["first layer"].kv_layers == {0}
    assert not parts["q, k and v"].kv_layers


def test_parts_that_say_nothing_new_are_left_out(tiny_model_dir: Path) -> None:
    """With exact activations the weights are everything, and there are no activations."""
    rows = rows_of(tiny_model_dir, "fp8-block:weights")
    assert "weights" not in named(rows) and "activations" not in named(rows)
    assert all(not row.parts.inputs for row in rows)
    assert NOTHING not in named(rows).values()
    assert {row.kind for row in rows_of(tiny_model_dir, "fp8-block", ("layers",))} == {
        "full",
        "layers",
    }


def build(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).eval()


def test_only_the_inputs_of_the_named_weights_are_rounded(tiny_model_dir: Path) -> None:
    model = build(tiny_model_dir)
    names = {"model.layers.1.self_attn.o_proj.weight", "model.layers.2.mlp.up_proj.weight"}
    undo = round_inputs(model, names, ServedNumerics.of(FP8))
    modules = dict(model.named_modules())
    assert {f"{name}.weight" for name, module in modules.items() if module._forward_pre_hooks} == (
        names
    )
    layer = modules["model.layers.1.self_attn.o_proj"]
    hidden = torch.randn(3, 64)
    exact = nn.functional.linear(hidden, layer.weight)
    assert not torch.equal(layer(hidden), exact)
    undo.close()
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(layer(hidden), exact)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_round_the_inputs_of_the_named_projections(family: str, tmp_path: Path) -> None:
    directory = make_model(tmp_path / family, family, dtype=torch.float32)
    rows = [row for row in param_rows(read_architecture(directory)) if row.fp8]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    numerics = ServedNumerics.of(FP8)
    tokens = torch.arange(2, 12)[None]

    @torch.no_grad()
    def logits(projection: str) -> Tensor:
        found = {
            name for row in rows if row.expert and projection in row.megatron for name in row.hf
        }
        with round_inputs(model, found, numerics):
            return model(tokens).logits

    exact = logits("nothing")
    outer, inner, both = logits("linear_fc1"), logits("linear_fc2"), logits("linear_fc")
    for one, other in ((outer, exact), (inner, exact), (outer, inner), (both, outer)):
        assert not torch.equal(one, other)
    # Nothing is left behind.
    assert torch.equal(logits("nothing"), exact)


def test_a_cache_rounds_the_named_layers() -> None:
    cache = ServedNumerics(kv_cache=E4M3).new_cache(kv_layers={1})
    states = torch.full((1, 1, 1, 4), 1.01)
    for layer, expected in ((0, 1.01), (1, 1.0)):
        for found in cache.update(states, states, layer):
            assert torch.equal(found, torch.full_like(states, expected))
