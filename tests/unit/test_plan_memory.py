"""Memory of `p3o plan` by hand, on models whose tensors can be counted, and its monotony."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_p3o.architecture import ModelArchitecture, read_architecture
from megatron_p3o.config import LayoutSection, PrecisionSection, RunConfig
from megatron_p3o.parallel.layout import ParallelLayout
from megatron_p3o.plan.activations import LayerCost, kept_by_layer
from megatron_p3o.plan.batch import Lengths, step_batch
from megatron_p3o.plan.memory import StageMemory, chunks_in_flight, trainer_memory
from megatron_p3o.plan.options import longest_lengths
from megatron_p3o.plan.parameters import StageParameters
from megatron_p3o.plan.precision import Precision
from tests.unit.plan_runs import DENSE, EXPERTS, GOLDEN, SERVERS, architecture, run_config

BF16 = Precision(trainer="bf16", rollout="bf16")


def memory(
    model: ModelArchitecture,
    config: RunConfig,
    data: int = 1,
    reference: ModelArchitecture | None = None,
) -> list[StageMemory]:
    size = config.layout.model_parallel_size * data
    layout = ParallelLayout.for_world(config.layout, size)
    return trainer_memory(config, model, layout, longest_lengths(config), reference)


def test_one_rank_by_hand(tmp_path: Path) -> None:
    """Two sequences of 8 tokens a microbatch, on 3240 parameters."""
    config = run_config(tmp_path, rollout=SERVERS)
    (stage,) = memory(architecture(tmp_path, DENSE), config)
    assert stage.resident == {"weights": 2 * 3240, "gradients": 4 * 3240, "optimizer": 12 * 3240}
    layer = (
        4 * 8 * 2  # norms: inputs and outputs
        + (8 + 2 * 4) * 2  # query, key, value
        + 8 * 2  # attention's output
        + 2 * 4  # log-sum-exp
        + 3 * 16 * 2  # gate, up, silu(gate)
        + 16 * 2  # their product
    )
    assert layer == 248
    assert stage.phases["train"] == {
        "activations": 16 * 2 * layer,
        "recomputed layer": 0,
        "temporaries": 16 * (2 * 8 * 2 + 3 * 16 * 2),
        "hidden states": 4 * 16 * 8 * 2,
        "output weight's gradient": 128 * 8 * 2,
        "log-prob chunk": 16 * 128 * 8,
    }
    train = sum(stage.phases["train"].values())
    # The scoring pass keeps nothing but takes the entropy: four fp32 copies of a chunk.
    assert stage.phases["score"]["log-prob chunk"] == 16 * 128 * 16
    assert stage.peak_phase == "score"
    score = 16 * (128 + 16) + 2 * 16 * 16 + 16 * 128 * 16
    assert sum(stage.phases["score"].values()) == score > train
    assert stage.total == pytest.approx(18 * 3240 + score * 1.05 + 3e9)


def test_recomputation(tmp_path: Path) -> None:
    model = architecture(tmp_path, DENSE)

    def train(recompute: str) -> dict[str, float]:
        config = run_config(tmp_path, rollout=SERVERS, train={"recompute": recompute})
        return memory(model, config)[0].phases["train"]

    assert train("full")["activations"] == 16 * 2 * 8 * 2
    assert train("full")["recomputed layer"] == 16 * 248
    assert train("selective")["activations"] == 16 * 2 * (248 - 8)


def test_fp32_has_no_second_copy_of_the_weights(tmp_path: Path) -> None:
    config = run_config(tmp_path, precision={"trainer": "fp32"}, rollout=SERVERS)
    resident = memory(architecture(tmp_path, DENSE), config)[0].resident
    assert (resident["weights"], resident["optimizer"]) == (4 * 3240, 8 * 3240)


def test_optimizer_state_is_shared_over_data_and_context_ranks(tmp_path: Path) -> None:
    model = architecture(tmp_path, EXPERTS)
    dense, expert = 2 * (192 + 8 + 16 + 32) + 2 * 1024 + 8, 2 * 576
    config = run_config(tmp_path, rollout=SERVERS, layout={"context": 2, "expert": 2})
    resident = memory(model, config, data=2)[0].resident
    # Four ranks: they share the dense layers' state; the halves of the experts are there twice.
    assert resident["optimizer"] == 12 * (dense / 4 + expert / 2 / 2)
    whole = run_config(
        tmp_path, rollout=SERVERS, layout={"expert": 2}, optimizer={"distributed": False}
    )
    assert memory(model, whole, data=2)[0].resident["optimizer"] == 12 * (dense + expert / 2)


def test_experts_keep_each_token_as_often_as_it_is_sent(tmp_path: Path) -> None:
    cost = LayerCost(layout=LayoutSection(), precision=BF16, recompute="none")
    kept = kept_by_layer(architecture(tmp_path, EXPERTS), 0, cost)
    assert kept == {
        "attention norm input": 16,
        "attention norm output": 16,
        "query, key, value": 32,
        "query and key before their norms": 24,
        "attention output": 16,
        "log-sum-exp": 8,
        "MLP norm input": 16,
        "MLP norm output": 16,
        "router": 9 * 4,
        "expert inputs": 2 * 8 * 2,
        "expert gate, up, silu(gate), product": 2 * 4 * 6 * 2,
        "expert weighted product": 2 * 6 * 2,
    }


def test_tensor_ranks_share_channels_and_with_sequence_parallelism_positions(
    tmp_path: Path,
) -> None:
    model = architecture(tmp_path, DENSE, num_key_value_heads=2)

    def total(**layout: Any) -> float:
        cost = LayerCost(layout=LayoutSection(**layout), precision=BF16, recompute="none")
        return sum(kept_by_layer(model, 0, cost).values())

    norms = 4 * 8 * 2
    channels = total() - norms
    assert total(tensor=2) == norms + channels / 2
    assert total(tensor=2, sequence_parallel=True) == total() / 2


def test_latent_attention_keeps_its_latents(tmp_path: Path) -> None:
    latent = architecture(
        tmp_path,
        {
            **DENSE,
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "num_key_value_heads": 2,
            "head_dim": 2,
            "q_lora_rank": None,
            "kv_lora_rank": 6,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 2,
            "v_head_dim": 3,
            "n_routed_experts": 2,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 6,
            "first_k_dense_replace": 1,
        },
    )
    cost = LayerCost(layout=LayoutSection(), precision=BF16, recompute="none")
    kept = kept_by_layer(latent, 0, cost)
    assert kept["latents"] == (6 + 2) * 2 + 6 * 2
    assert kept["query, key, value"] == (2 * 12 + 6) * 2
    assert kept["attention output"] == 6 * 2


def test_fp8_training_keeps_two_fp8_copies_and_fp8_inputs(tmp_path: Path) -> None:
    parameters = StageParameters(layers=1, dense=100, expert=0, fp8=64)
    fp8 = Precision(trainer="fp8-delayed", rollout="bf16")
    assert fp8.weight_bytes(parameters) == 200 + 2 * 64
    gathered = Precision(trainer="fp8-delayed", rollout="bf16", has_fp8_parameters=True)
    assert gathered.weight_bytes(parameters) == 2 * 36 + 2 * 64
    blocks = Precision(trainer="fp8-blockwise", rollout="bf16")
    assert blocks.weight_bytes(parameters) == 200 + round(2 * 64 * (1 + 4 / 128**2))
    assert BF16.weight_bytes(parameters) == 200
    cost = LayerCost(layout=LayoutSection(), precision=fp8, recompute="none")
    model = architecture(tmp_path, DENSE)
    as_bf16 = LayerCost(layout=LayoutSection(), precision=BF16, recompute="none")
    # Halved: the norms' outputs, the product. The attention's output has an FP8 form besides.
    saved = 2 * 8 + 16 - 8
    kept = sum(kept_by_layer(model, 0, cost).values())
    assert kept == sum(kept_by_layer(model, 0, as_bf16).values()) - saved


def test_the_section_names_its_types() -> None:
    section = SimpleNamespace(
        trainer="fp8-mxfp8",
        rollout="fp8-tensor",
        rollout_kv_cache="fp8_e5m2",
        fp8=SimpleNamespace(param_gather=True),
    )
    precision = Precision.of(section)  # type: ignore[arg-type]
    assert precision.is_fp8_trainer
    assert precision.has_fp8_parameters
    assert (precision.kv_bytes, precision.rollout_bytes, precision.optimizer_bytes) == (1, 2, 12)
    assert not Precision.of(PrecisionSection(trainer="bf16")).has_fp8_parameters


def test_reference_and_embedded_engine(tmp_path: Path) -> None:
    model = architecture(tmp_path, DENSE)
    config = run_config(tmp_path, reference={"kl_coefficient": 0.1})
    (stage,) = memory(model, config, reference=model)
    assert stage.resident["reference model"] == 2 * 3240
    assert stage.resident["rollout model"] == 2 * 1352
    # 16 sequences of 8 tokens, 2 layers, key and value of one head of 4.
    cache = 16 * 8 * 2 * 2 * 4 * 2
    assert stage.phases["generate"] == {
        "KV cache": cache,
        "copy of the KV cache": cache,
        "sampling": 16 * 10 * 18,
    }


def test_checkpoints_are_staged_in_host_memory(tmp_path: Path) -> None:
    model = architecture(tmp_path, DENSE)
    assert memory(model, run_config(tmp_path))[0].host_checkpoint == 0
    config = run_config(tmp_path, checkpoint={"every": 5})
    assert memory(model, config, data=2)[0].host_checkpoint == 3240 * (2 + 12)


@pytest.mark.parametrize(
    ("layout", "microbatches", "stage", "expected"),
    [
        ({}, 8, 0, 1),
        ({"pipeline": 4}, 8, 0, 4),
        ({"pipeline": 4}, 8, 3, 1),
        ({"pipeline": 4}, 2, 0, 2),
        # 2 x 3 until the last stage answers, 4 of the first chunk, and the one under way.
        ({"pipeline": 4, "virtual_pipeline": 2}, 8, 0, 11),
        ({"pipeline": 4, "virtual_pipeline": 2}, 8, 3, 5),
        ({"pipeline": 4, "virtual_pipeline": 2}, 4, 0, 8),
    ],
)
def test_microbatches_in_flight(
    layout: dict[str, int], microbatches: int, stage: int, expected: int, tmp_path: Path
) -> None:
    config = run_config(tmp_path, layout=layout)
    assert chunks_in_flight(config, microbatches, stage) == expected


def test_fused_scoring_keeps_all_microbatches(tmp_path: Path) -> None:
    model = architecture(tmp_path, DENSE)
    config = run_config(tmp_path, rollout=SERVERS, train={"scoring": "fused"})
    (stage,) = memory(model, config)
    assert stage.phases["train"]["activations"] == 8 * 16 * 2 * 248
    assert stage.phases["train"]["hidden states"] == (2 * 8 + 2) * 16 * 16
    assert stage.phases["train"]["log-prob chunk"] == 16 * 128 * 16


@pytest.mark.parametrize(
    ("train", "data", "microbatches", "tokens"),
    [
        ({}, 1, 8, 16),
        ({}, 3, 3, 16),  # six sequences on the busiest rank
        ({"microbatch_size": 32}, 2, 1, 64),
        ({"packing": True, "max_tokens_per_microbatch": 27}, 1, 6, 27),  # three of 8 in a pack
        ({"packing": True, "max_tokens_per_microbatch": 27}, 4, 2, 27),
        ({"optimizer_steps_per_rollout": 4}, 1, 2, 16),
    ],
)
def test_microbatches(
    train: dict[str, Any], data: int, microbatches: int, tokens: int, tmp_path: Path
) -> None:
    batch = step_batch(run_config(tmp_path, train=train), Lengths(prompt=5, response=4), data)
    assert (batch.microbatches, batch.microbatch_tokens) == (microbatches, tokens)


QWEN3 = read_architecture(GOLDEN / "Qwen3-8B-Base", with_weights=False)
POWERS = st.sampled_from([1, 2, 4, 8])


def qwen3(data: int = 1, train: dict[str, Any] | None = None, **layout: Any) -> list[StageMemory]:
    """By stage."""
    if layout.get("tensor", 1) > 1:
        layout["sequence_parallel"] = True
    config = run_config(
        GOLDEN / "Qwen3-8B-Base",
        rollout=SERVERS,
        layout=layout,
        train={"prompts_per_step": 64, **(train or {})},
        data={"max_prompt_tokens": 1024},
        sampling={"max_new_tokens": 1024},
    )
    return memory(QWEN3, config, data)


@settings(max_examples=15, deadline=None)
@given(tensor=POWERS, pipeline=st.sampled_from([1, 2, 3, 4]), context=POWERS, data=POWERS)
def test_more_ranks_never_need_more_memory(
    tensor: int, pipeline: int, context: int, data: int
) -> None:
    layout = {"tensor": tensor, "pipeline": pipeline, "context": context}
    stages = qwen3(data, **layout)
    for axis in ("tensor", "context"):
        for before, more in zip(
            stages, qwen3(data, **{**layout, axis: 2 * layout[axis]}), strict=True
        ):
            assert more.total <= before.total, axis
            for part, size in more.resident.items():
                assert size <= before.resident[part], (axis, part)
    for before, more in zip(stages, qwen3(2 * data, **layout), strict=True):
        assert more.resident["optimizer"] < before.resident["optimizer"]
        assert more.total < before.total
    # Twelve stages, so that no stage has more layers than before.
    deeper = max(stage.resident["gradients"] for stage in qwen3(data, **{**layout, "pipeline": 12}))
    assert deeper < max(stage.resident["gradients"] for stage in stages)


@settings(max_examples=15, deadline=None)
@given(tensor=POWERS, size=st.integers(1, 8))
def test_recomputation_and_smaller_microbatches_never_need_more(tensor: int, size: int) -> None:
    totals = [
        qwen3(tensor=tensor, train={"microbatch_size": size, "recompute": recompute})[0].total
        for recompute in ("full", "selective", "none")
    ]
    assert totals == sorted(totals)
    assert qwen3(tensor=tensor, train={"microbatch_size": size + 1})[0].total > totals[-1]
