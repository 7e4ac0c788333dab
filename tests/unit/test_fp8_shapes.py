"""Which matrices FP8 fits, which GPUs compute it, and what Megatron is told."""

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron.core.utils
import pytest
import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import Version

from megatron_p3o.architecture import MlaArchitecture, ModelArchitecture, MoeArchitecture
from megatron_p3o.config import PrecisionSection, RunConfig
from megatron_p3o.errors import ConfigurationError
from megatron_p3o.fp8_shapes import check_fp8
from megatron_p3o.parallel import fp8
from tests.dist.models import replay_config

RECIPES = ("fp8-delayed", "fp8-tensorwise", "fp8-blockwise", "fp8-mxfp8")
CPU = torch.device("cpu")

# Query, key and value heads are (4 + 2 * 2) * 64 = 512 wide.
DENSE = ModelArchitecture(
    family="llama",
    num_layers=4,
    hidden_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    ffn_hidden_size=512,
    vocab_size=100,
    max_position_embeddings=64,
    norm_epsilon=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    tie_word_embeddings=False,
    qkv_bias=False,
    qk_layernorm=False,
    initializer_range=0.02,
    eos_token_ids=(2,),
    torch_dtype="float32",
)
EXPERTS = MoeArchitecture(
    num_experts=4,
    experts_per_token=2,
    ffn_hidden_size=256,
    normalize_topk=True,
    layers=(1, 2, 3),
    shared_ffn_hidden_size=256,
)
MOE = replace(DENSE, family="glm4_moe", moe=EXPERTS)
LATENT = replace(
    DENSE,
    family="deepseek_v3",
    mla=MlaArchitecture(
        q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64
    ),
)


def config_of(precision: dict[str, Any], **sections: Any) -> RunConfig:
    return replay_config(
        Path("m"), Path("r"), steps=1, groups=1, group_size=2, precision=precision, **sections
    )


def trainer(precision: str, **layout: int) -> RunConfig:
    return config_of({"trainer": precision}, layout=layout)


def refusal(architecture: ModelArchitecture, config: RunConfig) -> str:
    with pytest.raises(ConfigurationError) as caught:
        check_fp8(architecture, config)
    return str(caught.value)


@pytest.mark.parametrize("precision", ["fp32", "bf16", *RECIPES])
@pytest.mark.parametrize("architecture", [DENSE, MOE, LATENT], ids=lambda a: a.family)
def test_shapes_that_fit_pass_in_every_precision(
    precision: str, architecture: ModelArchitecture
) -> None:
    for layout in ({}, {"tensor": 2}, {"tensor": 2, "expert_tensor": 2}):
        check_fp8(architecture, trainer(precision, **layout))


def test_other_precisions_take_any_shape() -> None:
    odd = replace(DENSE, hidden_size=250, ffn_hidden_size=9)
    for precision in ("fp32", "bf16"):
        check_fp8(odd, trainer(precision))


@pytest.mark.parametrize(
    ("architecture", "config", "message"),
    [
        (
            replace(DENSE, hidden_size=248),
            trainer("fp8-delayed"),
            "model.path: precision.trainer=fp8-delayed needs each rank's share of the model's "
            "hidden_size=248 to be a multiple of 16; choose a smaller size, or another precision",
        ),
        (
            replace(DENSE, hidden_size=272),  # 17 x 16, but 8.5 x 32
            trainer("fp8-mxfp8"),
            "model.path: precision.trainer=fp8-mxfp8 needs each rank's share of the model's "
            "hidden_size=272 to be a multiple of 32; choose a smaller size, or another precision",
        ),
        (
            replace(DENSE, ffn_hidden_size=520),
            trainer("fp8-tensorwise"),
            "layout.tensor=1: precision.trainer=fp8-tensorwise needs each rank's share of the "
            "model's ffn_hidden_size=520 to be a multiple of 16; choose a smaller size, or another "
            "precision",
        ),
        (
            replace(DENSE, ffn_hidden_size=384),
            trainer("fp8-blockwise", tensor=2),
            "layout.tensor=2: precision.trainer=fp8-blockwise needs each rank's share of the "
            "model's ffn_hidden_size=384 / 2 to be a multiple of 128; choose a smaller size, or "
            "another precision",
        ),
        (
            replace(DENSE, head_dim=32),  # 8 * 32 / 4 = 64
            trainer("fp8-blockwise", tensor=4),
            "layout.tensor=4: precision.trainer=fp8-blockwise needs each rank's share of the "
            "model's query, key and value heads' width=256 / 4 to be a multiple of 128; choose a "
            "smaller size, or another precision",
        ),
        (
            replace(DENSE, num_key_value_heads=4, head_dim=40),  # 480 / 2 is 7.5 x 32
            trainer("fp8-mxfp8", tensor=2),
            "layout.tensor=2: precision.trainer=fp8-mxfp8 needs each rank's share of the model's "
            "query, key and value heads' width=480 / 2 to be a multiple of 32; choose a smaller "
            "size, or another precision",
        ),
        (
            DENSE,
            trainer("fp8-delayed", tensor=3),
            "layout.tensor=3: precision.trainer=fp8-delayed needs each rank's share of the model's "
            "query, key and value heads' width=512 / 3 to be a multiple of 16; choose a smaller "
            "size, or another precision",
        ),
        (
            replace(MOE, moe=replace(EXPERTS, ffn_hidden_size=384)),
            trainer("fp8-blockwise", expert_tensor=2),
            "layout.expert_tensor=2: precision.trainer=fp8-blockwise needs each rank's share of "
            "the model's moe_intermediate_size=384 / 2 to be a multiple of 128; choose a smaller "
            "size, or another precision",
        ),
        (
            replace(MOE, moe=replace(EXPERTS, shared_ffn_hidden_size=128)),
            trainer("fp8-blockwise", tensor=2),
            "layout.tensor=2: precision.trainer=fp8-blockwise needs each rank's share of the "
            "model's shared experts' intermediate_size=128 / 2 to be a multiple of 128; choose a "
            "smaller size, or another precision",
        ),
        (
            replace(LATENT, num_attention_heads=2),
            trainer("fp8-blockwise", tensor=2),
            "layout.tensor=2: precision.trainer=fp8-blockwise needs each rank's share of the "
            "model's attention output width=128 / 2 to be a multiple of 128; choose a smaller "
            "size, or another precision",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_named(
    architecture: ModelArchitecture, config: RunConfig, message: str
) -> None:
    assert refusal(architecture, config) == message


def test_without_dense_layers_their_width_does_not_count() -> None:
    everywhere = replace(MOE, ffn_hidden_size=520, moe=replace(EXPERTS, layers=(0, 1, 2, 3)))
    check_fp8(everywhere, trainer("fp8-delayed"))
    assert "ffn_hidden_size=520" in refusal(
        replace(MOE, ffn_hidden_size=520), trainer("fp8-delayed")
    )


def served(precision: str, tensor: int, engine: str = "sglang") -> RunConfig:
    launch = {"replicas": 1, "tensor_parallel_size": tensor}
    return config_of(
        {"rollout": precision},
        rollout={"engine": engine, "replay_path": None, "launch": launch},
    )


def test_servers_split_no_blocks() -> None:
    check_fp8(DENSE, served("fp8-block", 2))
    check_fp8(DENSE, served("bf16", 8))
    check_fp8(replace(DENSE, ffn_hidden_size=520), served("fp8-block", 1))
    check_fp8(replace(DENSE, ffn_hidden_size=520), served("fp8-block", 2, engine="embedded"))
    message = refusal(replace(DENSE, ffn_hidden_size=384), served("fp8-block", 2))
    assert message == (
        "rollout.launch.tensor_parallel_size=2: precision.rollout=fp8-block needs each rank's "
        "share of the model's ffn_hidden_size=384 / 2 to be a multiple of 128; choose a smaller "
        "size, or another precision"
    )
    experts = replace(MOE, moe=replace(EXPERTS, ffn_hidden_size=128))
    assert "moe_intermediate_size=128 / 2" in refusal(experts, served("fp8-block", 2))


def section(trainer: str, **details: Any) -> PrecisionSection:
    return PrecisionSection.model_validate({"trainer": trainer, "fp8": details})


def recipe_fields(recipe: str, number_format: str) -> dict[str, Any]:
    return {
        "fp8": number_format,
        "fp8_recipe": recipe,
        "fp8_param": False,
        "fp8_margin": 0,
        "fp8_amax_history_len": 1024,
        "fp8_amax_compute_algo": "max",
    }


KEPT = {
    "first_last_layers_bf16": True,
    "num_layers_at_start_in_bf16": 1,
    "num_layers_at_end_in_bf16": 0,
}
FIELDS: list[tuple[PrecisionSection, dict[str, Any]]] = [
    (section("fp8-delayed"), recipe_fields("delayed", "hybrid")),
    (section("fp8-tensorwise"), recipe_fields("tensorwise", "hybrid")),
    (section("fp8-blockwise"), recipe_fields("blockwise", "e4m3")),
    (section("fp8-mxfp8"), recipe_fields("mxfp8", "e4m3")),
    (
        section("fp8-delayed", margin=2, amax_history=16, amax_from="most_recent", format="e4m3"),
        recipe_fields("delayed", "e4m3")
        | {"fp8_margin": 2, "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "most_recent"},
    ),
    (
        section("fp8-blockwise", format="hybrid", param_gather=True, bf16_layers_at_start=1),
        recipe_fields("blockwise", "hybrid") | {"fp8_param": True} | KEPT,
    ),
]


@pytest.mark.parametrize(("precision", "fields"), FIELDS)
def test_megatron_is_told_the_recipe_on_cuda_and_nothing_on_a_cpu(
    precision: PrecisionSection, fields: dict[str, Any]
) -> None:
    assert fp8.transformer_fields(precision, "cuda") == fields
    assert fp8.transformer_fields(precision, "cpu") == {}
    assert fp8.moe_fields(precision, "cuda") == {"moe_router_padding_for_quantization": True}
    assert fp8.moe_fields(precision, "cpu") == {}
    gathers = {"fp8_param_gather": True} if precision.fp8.param_gather else {}
    assert fp8.gather_fields(precision, "cuda") == gathers
    assert fp8.gather_fields(precision, "cpu") == {}
    assert fp8.parameter_dtype(precision, "cuda") is torch.bfloat16
    assert fp8.parameter_dtype(precision, "cpu") is torch.float32


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_precisions_set_nothing(precision: str) -> None:
    plain = section(precision)
    assert fp8.transformer_fields(plain, "cuda") == {}
    assert fp8.moe_fields(plain, "cuda") == fp8.gather_fields(plain, "cuda") == {}
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    assert fp8.parameter_dtype(plain, "cuda") is fp8.parameter_dtype(plain, "cpu") is dtype


@pytest.mark.parametrize(("precision", "fields"), FIELDS)
def test_megatron_knows_the_fields_and_takes_their_values(
    precision: PrecisionSection, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some rules of its configuration ask for Transformer Engine's version, which is not here.
    monkeypatch.setattr(megatron.core.utils, "get_te_version", lambda: Version("2.9.0"))
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert {*fields, *fp8.moe_fields(precision, "cuda")} <= known
    gather_fields = fp8.gather_fields(precision, "cuda")
    assert {*gather_fields} <= {f.name for f in dataclasses.fields(DistributedDataParallelConfig)}
    DistributedDataParallelConfig(use_distributed_optimizer=True, **gather_fields)
    told = TransformerConfig(
        num_layers=4,
        hidden_size=256,
        num_attention_heads=4,
        num_moe_experts=4,
        moe_ffn_hidden_size=256,
        moe_grouped_gemm=True,
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bf16=True,
        params_dtype=torch.bfloat16,
        **fields,
        **fp8.moe_fields(precision, "cuda"),
    )
    assert {name: getattr(told, name) for name in fields} == fields
    OptimizerConfig(fp8_recipe=told.fp8_recipe)


NO_TE = "needs Transformer Engine; install transformer-engine[pytorch], or choose bf16"


@pytest.mark.parametrize(
    ("recipe", "capability", "problem"),
    [
        (
            "delayed",
            (8, 0),
            "needs a GPU of compute capability 8.9 (Ada or Hopper) or later; this one has 8.0: "
            "choose bf16",
        ),
        ("delayed", (8, 9), None),
        ("tensorwise", (8, 9), None),
        (
            "blockwise",
            (8, 9),
            "needs a GPU of compute capability 9.0 (Hopper) or later; this one has 8.9: choose "
            "fp8-delayed or fp8-tensorwise",
        ),
        ("blockwise", (9, 0), None),
        (
            "mxfp8",
            (9, 0),
            "needs a GPU of compute capability 10.0 (Blackwell) or later; this one has 9.0: choose "
            "fp8-delayed or fp8-tensorwise or fp8-blockwise",
        ),
        ("mxfp8", (10, 0), None),
        ("tensorwise", (10, 0), None),
        ("blockwise", (10, 0), None),
        ("mxfp8", (12, 0), None),
    ],
)
def test_gpus_that_cannot_are_told_what_they_can(
    recipe: str, capability: tuple[int, int], problem: str | None
) -> None:
    assert fp8.missing_support(recipe, capability, has_transformer_engine=True) == problem
    assert fp8.missing_support(recipe, capability, has_transformer_engine=False) == NO_TE


def test_a_cpu_emulates_every_recipe_but_holds_no_fp8_weights() -> None:
    for recipe in RECIPES:
        fp8.check_device(section(recipe), CPU)
    with pytest.raises(ConfigurationError, match=r"precision\.fp8\.param_gather=true needs CUDA"):
        fp8.check_device(section("fp8-blockwise", param_gather=True), CPU)


def test_a_gpu_is_asked_for_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(fp8.importlib.util, "find_spec", lambda name: object())
    device = torch.device("cuda", 0)
    fp8.check_device(section("bf16"), device)
    fp8.check_device(section("fp8-tensorwise"), device)
    message = r"^precision\.trainer=fp8-mxfp8 needs a GPU of compute capability 10\.0"
    with pytest.raises(ConfigurationError, match=message):
        fp8.check_device(section("fp8-mxfp8"), device)
    monkeypatch.setattr(fp8.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="fp8-tensorwise needs Transformer Engine"):
        fp8.check_device(section("fp8-tensorwise"), device)
