"""Conversions: dtypes, FP8 block checkpoints, configurations both ways."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import DefaultSavePlanner
from transformers import AutoModelForCausalLM

from megatron_p3o.errors import ConfigurationError, InputError
from megatron_p3o.weights import (
    ReshardOptions,
    TargetLayout,
    dequantize_blockwise,
    quantize_blockwise,
    reshard,
)
from megatron_p3o.weights.layouts import GateUp
from megatron_p3o.weights.resharding.describe import describe_model, read_config
from megatron_p3o.weights.resharding.detect import open_source
from megatron_p3o.weights.resharding.model_config import (
    arguments_from_config,
    config_from_arguments,
)
from megatron_p3o.weights.resharding.target import row_expert
from tests.unit.reshard_models import make_model
from tests.unit.test_reshard import assert_same_model, load_weights, run

# Sizes that blocks of 128 do not divide, and several blocks.
SIZES = {"hidden_size": 160, "intermediate_size": 264, "num_hidden_layers": 2}
E4M3 = torch.float8_e4m3fn


def test_fp8_blocks_of_every_linear_layer_and_nothing_else(tmp_path: Path) -> None:
    start = make_model(tmp_path / "start", "qwen3_moe", **SIZES)
    before = load_weights(start)
    after = load_weights(run(start, tmp_path / "fp8", "hf", dtype="fp8-block"))
    quantized = {name for name in before if after[name].dtype is E4M3}
    assert {name + "_scale_inv" for name in quantized} == after.keys() - before.keys()
    for name, weight in before.items():
        high = any(part in name for part in ("norm", "embed", "lm_head", "mlp.gate."))
        assert (name in quantized) != high, name
        if high:
            assert torch.equal(after[name], weight)
            continue
        expected, scale = quantize_blockwise(weight)
        assert torch.equal(after[name].view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(after[name + "_scale_inv"], scale)
    config = read_config(tmp_path / "fp8")
    assert config["dtype"] == "bfloat16"
    quantization = config["quantization_config"]
    assert quantization["quant_method"] == "fp8"
    assert quantization["weight_block_size"] == [128, 128]
    assert quantization["activation_scheme"] == "dynamic"
    kept = set(quantization["modules_to_not_convert"])
    assert {"lm_head", "model.layers.1.mlp.gate"} <= kept
    assert "model.layers.1.self_attn.q_proj" not in kept


def test_fp8_is_kept_from_hf_to_hf_and_restored_for_megatron(tmp_path: Path) -> None:
    start = make_model(tmp_path / "start", "llama", **SIZES)
    fp8 = run(start, tmp_path / "fp8", "hf", dtype="fp8-block")
    assert_same_model(fp8, run(fp8, tmp_path / "same", "hf", max_shard_bytes=100_000))
    # Scales are those of the whole tensor, so 264 / 2 rows a rank are no obstacle.
    cut = run(fp8, tmp_path / "cut", "torch", layout=TargetLayout(tensor=2))
    back = load_weights(run(cut, tmp_path / "back", "hf"))
    stored, original = load_weights(fp8), load_weights(start)
    assert back.keys() == original.keys()
    for name, weight in back.items():
        expected = stored[name]
        if expected.dtype is E4M3:
            scale = stored[name + "_scale_inv"]
            expected = dequantize_blockwise(expected, scale, dtype=torch.bfloat16)
        assert torch.equal(weight, expected), name
    assert "quantization_config" not in read_config(tmp_path / "back")
    full = load_weights(run(fp8, tmp_path / "full", "hf", dtype="fp32"))
    assert {tensor.dtype for tensor in full.values()} == {torch.float32}


def test_fp8_scales_are_checked(tmp_path: Path) -> None:
    start = make_model(tmp_path / "start", "llama", **SIZES)
    fp8 = run(start, tmp_path / "fp8", "hf", dtype="fp8-block")
    weights = load_file(fp8 / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    scale = weights.pop(name + "_scale_inv")
    save_file(weights, fp8 / "model.safetensors")
    with pytest.raises(InputError, match="without its scales"):
        open_source(fp8)
    save_file({**weights, name + "_scale_inv": scale[:1]}, fp8 / "model.safetensors")
    with pytest.raises(InputError, match=r"shape \[1, 2\], blocks of 128 x 128 need \[3, 2\]"):
        open_source(fp8)


def test_dtypes(tmp_path: Path) -> None:
    start = make_model(tmp_path / "start", "deepseek_v3", dtype=torch.float32)
    before = load_weights(start)
    half = run(start, tmp_path / "half", "torch_dist", dtype="bf16")
    after = load_weights(run(half, tmp_path / "end", "hf"))
    for name, weight in before.items():
        # The bias that chooses experts is float32 in Megatron too.
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        assert after[name].dtype is dtype
        assert torch.equal(after[name], weight.to(dtype))
    assert read_config(tmp_path / "end")["dtype"] == "bfloat16"


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 5000000.0},
    {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rope", ROPES, ids=["default", "llama3"])
def test_arguments_hold_every_field_that_matters(
    tmp_path: Path, family: str, tied: bool, rope: dict[str, Any]
) -> None:
    """config.json -> Megatron-LM's arguments -> config.json gives the same model."""
    start = make_model(
        tmp_path / "start",
        family,
        tied=tied,
        rope_parameters=rope,
        rms_norm_eps=3e-6,
        initializer_range=0.03,
        num_hidden_layers=1,
    )
    config = read_config(start)
    if family == "qwen3_moe":
        config |= {"norm_topk_prob": True, "mlp_only_layers": [0], "num_hidden_layers": 3}
    architecture = describe_model(config, "start")
    layout = TargetLayout(tensor=2).resolved(architecture)
    arguments = arguments_from_config(config, architecture, layout)
    assert arguments.padded_vocab_size == 256
    made = config_from_arguments(vars(arguments), "start")
    again = describe_model(made, "made")
    # Not in the arguments: what dtype a file declares.
    assert {**vars_of(again), "torch_dtype": None} == {**vars_of(architecture), "torch_dtype": None}
    assert made["architectures"] == config["architectures"]
    assert made["rope_parameters"] == config["rope_parameters"]


def vars_of(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def test_a_megatron_checkpoint_without_config_uses_its_arguments(tmp_path: Path) -> None:
    """Weights and logits come back from `args` alone, as Megatron-LM stores them."""
    start = make_model(tmp_path / "start", "qwen3", dtype=torch.float32)
    cut = run(start, tmp_path / "cut", "torch", layout=TargetLayout(tensor=2))
    for path in (cut / "hf").iterdir():
        path.unlink()
    (cut / "hf").rmdir()
    end = run(cut, tmp_path / "end", "hf")
    tokens = torch.tensor([[5, 17, 42, 99, 3]])
    logits = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(tokens).logits
        for path in (start, end)
    ]
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"swiglu": False}, "swiglu=False.*which have True"),
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type"),
        ({"vocab_size": None}, "vocab_size=None must be a positive integer"),
    ],
    ids=str,
)
def test_arguments_of_other_models_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    config = read_config(make_model(tmp_path / "start", "llama", num_hidden_layers=1))
    architecture = describe_model(config, "start")
    arguments = arguments_from_config(config, architecture, TargetLayout().resolved(architecture))
    with pytest.raises(InputError, match=message):
        describe_model(config_from_arguments({**vars(arguments), **change}, "x"), "x")
    del arguments.num_layers
    with pytest.raises(InputError, match="lack num_layers"):
        config_from_arguments(vars(arguments), "x")


def test_any_rope_scaling_is_carried(tmp_path: Path) -> None:
    """Yarn cannot be said in Megatron-LM's arguments; config.json says it."""
    start = make_model(tmp_path / "start", "qwen3", num_hidden_layers=1)
    config = json.loads((start / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}
    (start / "config.json").write_text(json.dumps(config))
    cut = run(start, tmp_path / "cut", "torch_dist", layout=TargetLayout(tensor=2))
    assert_same_model(start, run(cut, tmp_path / "end", "hf"))


def test_arguments_that_leave_fields_open_are_refused(tmp_path: Path) -> None:
    start = make_model(tmp_path / "start", "deepseek_v3", num_hidden_layers=2)
    cut = run(start, tmp_path / "cut", "torch")
    for path in (cut / "hf").iterdir():
        path.unlink()
    (cut / "hf").rmdir()
    with pytest.raises(InputError, match=r"multi_latent_attention=True.*--config"):
        open_source(cut)
    assert_same_model(start, run(cut, tmp_path / "end", "hf", config_dir=start))


@pytest.mark.parametrize("common", ["file", "entry"])
def test_the_optimizer_is_carried_between_torch_dist_checkpoints(
    tmp_path: Path, common: str
) -> None:
    """torch saves it, the tool copies it, torch loads it.

    What is not sharded is a file, or an entry as newer versions of Megatron-Core write it.
    """
    start = make_model(tmp_path / "start", "llama", num_hidden_layers=1)
    opened = open_source(start)
    weights = {row.megatron: opened.read(row).merged() for row in opened.rows}
    moments = {
        f"optimizer.state.exp_avg.{name}": torch.randn(t.shape) for name, t in weights.items()
    }
    saved, kept = tmp_path / "saved", tmp_path / "kept"
    state = {"optimizer": {"param_groups": [{"lr": 0.5}]}, "iteration": 7}
    entry = {"common_state/shard_0_1": [state]} if common == "entry" else {}
    torch_checkpoint.save(
        {**weights, **moments, **entry},
        checkpoint_id=saved,
        no_dist=True,
        planner=DefaultSavePlanner(flatten_state_dict=False),
    )
    if common == "file":
        torch.save(state, saved / "common.pt")
    (saved / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')

    options = ReshardOptions(
        to="torch_dist", layout=TargetLayout(tensor=2), optimizer=True, config_dir=start
    )
    assert not reshard(saved, kept, options).num_nonfinite
    loaded = {name: torch.zeros_like(moment) for name, moment in moments.items()}
    torch_checkpoint.load(loaded, checkpoint_id=kept, no_dist=True)
    for name, moment in moments.items():
        assert torch.equal(loaded[name], moment)
    assert torch.load(kept / "common.pt", weights_only=True) == state
    assert open_source(kept, config_dir=start).iteration == 7
    assert_same_model(start, run(kept, tmp_path / "end", "hf"))
    with pytest.raises(ConfigurationError, match="--optimizer with SRC as hf"):
        reshard(start, tmp_path / "x", ReshardOptions(to="torch_dist", optimizer=True))


def test_singleton_shards_are_read(tmp_path: Path) -> None:
    """Megatron's `singleton_local_shards`: every expert and half of a gated layer has its key."""
    start = make_model(tmp_path / "start", "qwen3_moe", num_hidden_layers=2)
    opened = open_source(start)
    tensors: dict[str, torch.Tensor] = {}
    for row in opened.rows:
        name = (row.te_name or row.megatron) if row_expert(row) is None else row.megatron
        key = name.replace(".local_experts.", ".experts.")
        merged = opened.read(row).merged()
        if isinstance(row.layout, GateUp):
            tensors[key + "_w"], tensors[key + "_v"] = merged.chunk(2)
        else:
            tensors[key] = merged
    assert "decoder.layers.1.mlp.experts.experts.3.linear_fc1.weight_v" in tensors
    saved = tmp_path / "saved"
    torch_checkpoint.save(tensors, checkpoint_id=saved, no_dist=True)
    torch.save({}, saved / "common.pt")
    (saved / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert_same_model(start, run(saved, tmp_path / "end", "hf", config_dir=start))
