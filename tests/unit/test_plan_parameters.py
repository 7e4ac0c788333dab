"""Counts of `p3o plan`: by hand, by the tables of the weights, and as published."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from megatron_p3o.architecture import ModelArchitecture, read_architecture
from megatron_p3o.config import LayoutSection
from megatron_p3o.plan.parameters import (
    chunk_layers,
    count_model,
    count_stages,
    layer_weights,
    model_weights,
)
from megatron_p3o.plan.precision import Precision
from megatron_p3o.plan.sync import served_model_bytes
from megatron_p3o.weights.families import param_rows
from megatron_p3o.weights.publish import ServedFormat, served_tensors
from megatron_p3o.weights.resharding import console
from tests.dist.models import make_model, tiny_config
from tests.unit.plan_runs import DENSE, EXPERTS, GOLDEN, architecture

FAMILIES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"),
    *("glm4", "glm4_moe", "deepseek_v2", "deepseek_v3"),
)


def tiny(directory: Path, family: str, tied: bool) -> ModelArchitecture:
    tiny_config(family, tied=tied).save_pretrained(directory)
    return read_architecture(directory, with_weights=False)


def test_a_dense_model_by_hand(tmp_path: Path) -> None:
    counts = count_model(architecture(tmp_path, DENSE))
    attention = 8 * 8 + 4 * 8 + 4 * 8 + 8 * 8
    layer = attention + 3 * 16 * 8 + 2 * 8
    assert counts.dense_layer == layer == 592
    assert counts.moe_layer is None
    assert counts.embedding == 2 * 10 * 8
    assert counts.total == counts.active == 2 * layer + 160 + 8


def test_a_model_with_experts_by_hand(tmp_path: Path) -> None:
    counts = count_model(architecture(tmp_path, EXPERTS))
    expert = 3 * 6 * 8
    layer = 192 + 2 * 4 + 2 * 8 + 4 * 8 + 4 * expert
    assert counts.moe_layer == layer == 824
    assert counts.dense_layer is None
    assert counts.total == 2 * layer + 168
    assert counts.active == counts.total - 2 * 2 * expert


_LLAMA3: dict[str, Any] = {
    **DENSE,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
_MIXTRAL: dict[str, Any] = {
    **_LLAMA3,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_DEEPSEEK_V3: dict[str, Any] = {
    **DENSE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "head_dim": 64,
    "vocab_size": 129280,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


@pytest.mark.parametrize(
    ("fields", "total", "active"),
    [
        (_LLAMA3, 8_030_261_248, 8.03e9),
        (_MIXTRAL, 46_702_792_704, 12.9e9),
        # Without the layer for further tokens; "671B, 37B activated".
        (_DEEPSEEK_V3, 671_026_404_352, 37e9),
    ],
    ids=["Llama-3.1-8B", "Mixtral-8x7B", "DeepSeek-V3"],
)
def test_published_models(
    fields: dict[str, Any], total: int, active: float, tmp_path: Path
) -> None:
    counts = count_model(architecture(tmp_path, fields))
    assert counts.total == total
    assert counts.active == pytest.approx(active, rel=0.02)


def test_the_models_of_the_examples() -> None:
    dense = count_model(read_architecture(GOLDEN / "Qwen3-8B-Base", with_weights=False))
    assert dense.total == 8_190_735_360
    moe = count_model(read_architecture(GOLDEN / "Qwen3-30B-A3B-Base", with_weights=False))
    assert moe.total == 30_532_122_624
    assert moe.active / 1e9 == pytest.approx(3.3, abs=0.06)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_tables(family: str, tied: bool, tmp_path: Path) -> None:
    model = tiny(tmp_path, family, tied)
    rows = param_rows(model)
    shapes = sorted((shape, row.fp8) for row in rows for shape in row.hf.values())
    ours = sorted(
        (shape, weight.fp8)
        for weight in model_weights(model)
        for shape in weight.hf * weight.copies
    )
    assert ours == shapes
    kept = sum(not w.is_trained for w in model_weights(model))
    assert kept == sum(row.keep_dtype for row in rows)


@pytest.mark.parametrize("trainer", ["bf16", "fp32"])
@pytest.mark.parametrize("family", ["qwen3", "glm4", "deepseek_v3"])
def test_bytes_are_those_that_servers_get(family: str, trainer: str, tmp_path: Path) -> None:
    model = tiny(tmp_path, family, False)
    held = {"bf16": torch.bfloat16, "fp32": torch.float32}[trainer]
    formats = {
        "bf16": ServedFormat(dtype=torch.bfloat16),
        "fp32": ServedFormat(dtype=torch.float32),
        "fp8-block": ServedFormat(fp8=True),
    }
    for rollout, served in formats.items():
        named = (
            (name, torch.zeros(shape, dtype=torch.float32 if row.keep_dtype else held))
            for row in param_rows(model)
            for name, shape in row.hf.items()
        )
        sent = sum(tensor.nbytes for _, tensor in served_tensors(named, model, served))
        assert served_model_bytes(model, Precision(trainer=trainer, rollout=rollout)) == sent


def test_bytes_are_those_that_reshard_writes(tmp_path: Path) -> None:
    source = make_model(tmp_path / "hf", "qwen3_moe", tied=False, hidden_size=160)
    sizes = {"tensor": 1, "pipeline": 1, "virtual_pipeline": 1, "expert": 1}
    for dtype in ("bf16", "fp8-block"):
        destination = tmp_path / dtype
        console.convert(
            str(source),
            str(destination),
            to="hf",
            sizes=sizes,
            expert_tensor=None,
            chunk_layers=None,
            vocab_divisible_by=128,
            names="te",
            dtype=dtype,
            optimizer=False,
            max_shard_size="5GB",
            workers=1,
            verify=False,
            config_dir=None,
            allow_nonfinite=False,
            unsafe_pickle=False,
        )
        written = 0
        for path in destination.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                written += sum(file.get_tensor(name).nbytes for name in list(file.keys()))
        model = read_architecture(source)
        # The model is stored in fp32, and what is not FP8 stays so.
        precision = Precision(trainer="fp32", rollout=dtype)
        assert served_model_bytes(model, precision) == written


def test_fp8_per_tensor_has_one_scale(tmp_path: Path) -> None:
    weight = layer_weights(architecture(tmp_path, DENSE), 0)[0]
    assert weight.hf == ((8, 8), (4, 8), (4, 8))
    precision = Precision(trainer="bf16", rollout="fp8-tensor")
    assert precision.served_bytes(weight) == 128 + 3 * 4


def stages(model: ModelArchitecture, **layout: Any) -> list[tuple[int, int]]:
    return [(s.dense, s.expert) for s in count_stages(model, LayoutSection(**layout))]


def test_ranks_hold_their_share(tmp_path: Path) -> None:
    model = architecture(tmp_path, DENSE)
    assert stages(model) == [(2 * 592 + 2 * 128 * 8 + 8, 0)]
    # Of two tensor ranks each has half of the matrices, all norms, 128 of 256 padded rows.
    assert stages(model, tensor=2) == [(2 * (96 + 192 + 16) + 2 * 128 * 8 + 8, 0)]
    assert stages(model, pipeline=2) == [(592 + 1024, 0), (592 + 1024 + 8, 0)]
    assert stages(architecture(tmp_path, DENSE, tie_word_embeddings=True)) == [(2216, 0)]
    tied = architecture(tmp_path, DENSE, tie_word_embeddings=True)
    assert stages(tied, pipeline=2) == [(592 + 1024, 0), (592 + 1024 + 8, 0)]
    experts = architecture(tmp_path, EXPERTS)
    shared = 2 * (192 + 8 + 16 + 32) + 2 * 1024 + 8
    assert stages(experts) == [(shared, 2 * 576)]
    assert stages(experts, expert=2) == [(shared, 576)]
    assert stages(experts, expert=2, expert_tensor=2) == [(shared, 288)]


@pytest.mark.parametrize(
    ("layout", "chunks"),
    [
        ({"pipeline": 2}, [[(0, 4)], [(4, 8)]]),
        ({"pipeline": 2, "virtual_pipeline": 2}, [[(0, 2), (4, 6)], [(2, 4), (6, 8)]]),
        ({"pipeline": 3, "first_stage_layers": 2}, [[(0, 2)], [(2, 5)], [(5, 8)]]),
        ({"pipeline": 3, "last_stage_layers": 4}, [[(0, 2)], [(2, 4)], [(4, 8)]]),
    ],
)
def test_layers_are_dealt_as_megatron_deals_them(
    layout: dict[str, int], chunks: list[list[tuple[int, int]]]
) -> None:
    dealt = chunk_layers(8, LayoutSection(**layout))
    assert [[(c.start, c.stop) for c in stage] for stage in dealt] == chunks


def test_an_embedding_that_counts_takes_a_layers_place() -> None:
    section = LayoutSection(
        pipeline=2, virtual_pipeline=2, account_for_embedding=True, account_for_loss=True
    )
    dealt = chunk_layers(6, section)
    assert [[list(chunk) for chunk in stage] for stage in dealt] == [[[0], [3, 4]], [[1, 2], [5]]]
