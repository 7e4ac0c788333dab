"""How layers and experts are shared, and what is refused with the nearest legal value."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_p3o.architecture import ModelArchitecture, MoeArchitecture
from megatron_p3o.config import LayoutSection
from megatron_p3o.errors import ConfigurationError
from megatron_p3o.splitting import check_layout, stage_layers

_DENSE = ModelArchitecture(
    family="llama",
    num_layers=12,
    hidden_size=576,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    ffn_hidden_size=1536,
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
_MOE = replace(
    _DENSE,
    family="qwen3_moe",
    moe=MoeArchitecture(
        num_experts=8,
        experts_per_token=2,
        ffn_hidden_size=96,
        normalize_topk=True,
        layers=tuple(range(12)),
    ),
)


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        ({}, [12]),
        ({"pipeline": 4}, [3, 3, 3, 3]),
        ({"pipeline": 2, "first_stage_layers": 5}, [5, 7]),
        ({"pipeline": 4, "first_stage_layers": 2, "last_stage_layers": 4}, [2, 3, 3, 4]),
        ({"pipeline": 2, "first_stage_layers": 5, "last_stage_layers": 7}, [5, 7]),
        ({"pipeline": 2, "first_stage_layers": 5, "last_stage_layers": 6}, None),
        ({"pipeline": 3, "last_stage_layers": 1}, None),
        ({"pipeline": 5}, None),
        ({"pipeline": 13, "account_for_loss": True}, [1] * 13),
        ({"pipeline": 2, "account_for_embedding": True, "account_for_loss": True}, [7, 7]),
        ({"pipeline": 2, "account_for_embedding": True}, None),
    ],
)
def test_layers_of_each_stage(layout: dict[str, Any], sizes: list[int] | None) -> None:
    assert stage_layers(12, LayoutSection(**layout)) == sizes


@given(st.integers(1, 24), st.integers(2, 6), st.integers(1, 8), st.integers(1, 8))
def test_stages_hold_every_layer_once(layers: int, pipeline: int, first: int, last: int) -> None:
    layout = LayoutSection(pipeline=pipeline, first_stage_layers=first, last_stage_layers=last)
    sizes = stage_layers(layers, layout)
    assume(sizes is not None)
    assert sizes is not None
    assert (len(sizes), sum(sizes), sizes[0], sizes[-1]) == (pipeline, layers, first, last)
    assert min(sizes) > 0 and len(set(sizes[1:-1])) <= 1


_REFUSED: list[tuple[ModelArchitecture, dict[str, Any], str]] = [
    (
        _DENSE,
        {"tensor": 2},
        "layout.tensor=2 must divide the model's num_attention_heads=9 and "
        "num_key_value_heads=3; the nearest legal value is 1 (legal: 1, 3)",
    ),
    (
        _DENSE,
        {"tensor": 9},
        "layout.tensor=9 must divide the model's num_key_value_heads=3 and "
        "ffn_hidden_size=1536; the nearest legal value is 3 (legal: 1, 3)",
    ),
    (
        _DENSE,
        {"pipeline": 5},
        "layout.pipeline=5 must divide the model's num_layers=12; the nearest legal value is 4 "
        "(legal: 1, 2, 3, 4, 6, 12)",
    ),
    (
        _DENSE,
        {"pipeline": 2, "account_for_loss": True},
        "layout.pipeline=2 must divide the model's num_layers=12 + 1 for account_for_loss; the "
        "nearest legal value is 1 (legal: 1, 13)",
    ),
    (
        _DENSE,
        {"pipeline": 4, "virtual_pipeline": 2},
        "layout.virtual_pipeline=2 must divide the layers of every pipeline stage (3, 3, 3, 3); "
        "the nearest legal value is 1 (legal: 1, 3)",
    ),
    (
        _DENSE,
        {"pipeline": 3, "virtual_pipeline": 4, "first_stage_layers": 4, "last_stage_layers": 2},
        "layout.virtual_pipeline=4 must divide the layers of every pipeline stage (4, 6, 2); "
        "the nearest legal value is 2 (legal: 1, 2)",
    ),
    (
        _DENSE,
        {"pipeline": 3, "first_stage_layers": 5},
        "layout.first_stage_layers=5 leaves layers that layout.pipeline=3 stages cannot share "
        "evenly (the model's num_layers=12); the nearest legal value is 4 (legal: 2, 4, 6, 8, 10)",
    ),
    (
        _DENSE,
        {"pipeline": 2, "first_stage_layers": 12, "last_stage_layers": 12},
        "layout.pipeline=2 must divide the model's num_layers=12; no value fits the layers fixed "
        "for the first and last stage; remove those fields",
    ),
    (
        _DENSE,
        {"expert": 2},
        "layout.expert=2 shares experts, but the model has none; the nearest legal value is 1",
    ),
    (
        _DENSE,
        {"expert_tensor": 2},
        "layout.expert_tensor=2 shares experts, but the model has none; the nearest legal value "
        "is 1",
    ),
    (
        _MOE,
        {"expert": 3},
        "layout.expert=3 must divide the model's num_experts=8; the nearest legal value is 2 "
        "(legal: 1, 2, 4, 8)",
    ),
    (
        _MOE,
        {"expert_tensor": 5},
        "layout.expert_tensor=5 must divide the model's moe_intermediate_size=96; the nearest "
        "legal value is 4 (legal: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96)",
    ),
    (
        _MOE,
        {"tensor": 3},
        "layout.sequence_parallel=false must be true for a mixture-of-experts model with "
        "layout.tensor=3: otherwise every tensor rank would route the same tokens; set it to true",
    ),
]


@pytest.mark.parametrize(("architecture", "layout", "message"), _REFUSED)
def test_layouts_that_do_not_divide_the_model(
    architecture: ModelArchitecture, layout: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_layout(architecture, LayoutSection(**layout))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [
        (_DENSE, {"tensor": 3, "pipeline": 4, "virtual_pipeline": 3}),
        (_DENSE, {"pipeline": 3, "first_stage_layers": 4, "virtual_pipeline": 2}),
        (_MOE, {"expert": 8, "expert_tensor": 32}),
        (_MOE, {"tensor": 3, "sequence_parallel": True, "expert": 2}),
        # No layer uses the dense width, so nothing need divide it.
        (replace(_MOE, ffn_hidden_size=7), {"tensor": 3, "sequence_parallel": True}),
    ],
)
def test_legal_layouts_pass(architecture: ModelArchitecture, layout: dict[str, Any]) -> None:
    check_layout(architecture, LayoutSection(**layout))


def test_sequence_parallelism_pads_to_the_tensor_ranks() -> None:
    assert LayoutSection(tensor=3, sequence_parallel=True).sequence_multiple == 3
    assert LayoutSection(tensor=3).sequence_multiple == 1
    with pytest.raises(ValidationError, match=r"needs layout\.tensor >= 2"):
        LayoutSection(sequence_parallel=True)


def test_the_interleaved_schedule_takes_multiples_of_its_stages() -> None:
    assert LayoutSection(pipeline=3, virtual_pipeline=2).microbatch_multiple == 3
    assert LayoutSection(pipeline=3).microbatch_multiple == 1
