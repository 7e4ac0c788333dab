"""The tables cover a model completely: transformers' names and shapes, Megatron's names."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megatron_p3o.architecture import ModelArchitecture, MoeArchitecture
from megatron_p3o.model_files import read_weight_headers
from megatron_p3o.weights import param_rows, rows_by_megatron_name

_LLAMA = ModelArchitecture(
    family="llama",
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    ffn_hidden_size=48,
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
_QWEN3 = replace(_LLAMA, family="qwen3", qk_layernorm=True)
# The second of two layers is a mixture of three experts.
_QWEN3_MOE = replace(
    _QWEN3,
    family="qwen3_moe",
    moe=MoeArchitecture(
        num_experts=3, experts_per_token=2, ffn_hidden_size=20, normalize_topk=True, layers=(1,)
    ),
)

# named_parameters() of megatron-core 0.16.1's GPTModel with one layer, local layers.
_LOCAL_NAMES = {
    "embedding.word_embeddings.weight",
    "decoder.layers.0.input_layernorm.weight",
    "decoder.layers.0.self_attention.linear_proj.weight",
    "decoder.layers.0.self_attention.linear_qkv.weight",
    "decoder.layers.0.pre_mlp_layernorm.weight",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.0.mlp.linear_fc2.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
}
_QK_NORMS = {
    "decoder.layers.0.self_attention.q_layernorm.weight",
    "decoder.layers.0.self_attention.k_layernorm.weight",
}
# The same with Transformer Engine layers.
_TE_NORMS = {
    "decoder.layers.0.input_layernorm.weight": (
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    ),
    "decoder.layers.0.pre_mlp_layernorm.weight": (
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"
    ),
}


def _hf_model(architecture: ModelArchitecture) -> PreTrainedModel:
    shared: dict[str, Any] = {
        "num_hidden_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "num_attention_heads": architecture.num_attention_heads,
        "num_key_value_heads": architecture.num_key_value_heads,
        "head_dim": architecture.head_dim,
        "intermediate_size": architecture.ffn_hidden_size,
        "vocab_size": architecture.vocab_size,
        "tie_word_embeddings": architecture.tie_word_embeddings,
    }
    with torch.device("meta"):
        if architecture.family == "llama":
            return LlamaForCausalLM(LlamaConfig(**shared))
        return Qwen3ForCausalLM(Qwen3Config(**shared))


@pytest.mark.parametrize("architecture", [_LLAMA, _QWEN3], ids=lambda a: a.family)
@pytest.mark.parametrize("tied", [True, False])
def test_rows_are_exactly_the_tensors_of_transformers(
    architecture: ModelArchitecture, tied: bool
) -> None:
    architecture = replace(architecture, tie_word_embeddings=tied)
    rows = param_rows(architecture)
    ours = [(name, shape) for row in rows for name, shape in row.hf.items()]
    theirs = {name: tuple(p.shape) for name, p in _hf_model(architecture).named_parameters()}
    assert len(ours) == len(theirs)
    assert dict(ours) == theirs


@pytest.mark.parametrize("architecture", [_LLAMA, _QWEN3], ids=lambda a: a.family)
def test_names_are_megatrons(architecture: ModelArchitecture) -> None:
    rows = param_rows(replace(architecture, num_layers=1))
    expected = _LOCAL_NAMES | (_QK_NORMS if architecture.qk_layernorm else set())
    assert {row.megatron for row in rows} == expected
    assert {row.megatron: row.te_name for row in rows if row.te_name} == _TE_NORMS


def test_mixture_of_experts_rows_are_those_of_a_checkpoint(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        intermediate_size=48,
        vocab_size=100,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        decoder_sparse_step=2,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    (stored,) = read_weight_headers(tmp_path).values()
    rows = param_rows(_QWEN3_MOE)
    ours = [(name, shape) for row in rows for name, shape in row.hf.items()]
    assert len(ours) == len(stored)
    assert dict(ours) == stored


def test_experts_have_global_names_in_both_spellings() -> None:
    rows = {row.megatron: row for row in param_rows(_QWEN3_MOE)}
    experts = "decoder.layers.1.mlp.experts."
    assert {name for name, row in rows.items() if row.expert} == {
        f"{experts}local_experts.{e}.linear_fc{fc}.weight" for e in range(3) for fc in (1, 2)
    }
    row = rows[f"{experts}local_experts.2.linear_fc1.weight"]
    assert row.te_name == f"{experts}linear_fc1.weight2"
    assert list(row.hf) == [
        "model.layers.1.mlp.experts.2.gate_proj.weight",
        "model.layers.1.mlp.experts.2.up_proj.weight",
    ]
    router = rows["decoder.layers.1.mlp.router.weight"]
    assert (dict(router.hf), router.fp8) == ({"model.layers.1.mlp.gate.weight": (3, 32)}, False)
    # Transformer Engine leaves this norm outside of the experts; see the dense layer 0.
    assert rows["decoder.layers.1.pre_mlp_layernorm.weight"].te_name is None
    assert rows["decoder.layers.0.pre_mlp_layernorm.weight"].te_name is not None


@pytest.mark.parametrize("architecture", [_LLAMA, _QWEN3, _QWEN3_MOE], ids=lambda a: a.family)
@pytest.mark.parametrize("size", [1, 2])
def test_every_row_is_an_inverse_pair(architecture: ModelArchitecture, size: int) -> None:
    torch.manual_seed(0)
    for row in param_rows(architecture):
        tensors = [torch.randn(shape) for shape in row.hf.values()]
        merged = row.layout.merge(tensors)
        shards = [row.layout.shard(merged, rank, size) for rank in range(size)]
        back = row.layout.split(row.layout.unshard(shards))
        assert all(torch.equal(a, b) for a, b in zip(back, tensors, strict=True)), row.megatron


def test_layers_are_counted_globally() -> None:
    rows = rows_by_megatron_name(_LLAMA)
    assert list(rows["decoder.layers.1.mlp.linear_fc2.weight"].hf) == [
        "model.layers.1.mlp.down_proj.weight"
    ]


def test_both_norm_spellings_resolve_to_one_row() -> None:
    rows = rows_by_megatron_name(replace(_LLAMA, num_layers=1))
    for local, te in _TE_NORMS.items():
        assert rows[local] is rows[te]
    norms = {local: list(rows[local].hf) for local in _TE_NORMS}
    assert norms == {
        "decoder.layers.0.input_layernorm.weight": ["model.layers.0.input_layernorm.weight"],
        "decoder.layers.0.pre_mlp_layernorm.weight": [
            "model.layers.0.post_attention_layernorm.weight"
        ],
    }


def test_output_layer_is_the_embedding_when_tied() -> None:
    tied = rows_by_megatron_name(replace(_LLAMA, tie_word_embeddings=True))
    assert list(tied["output_layer.weight"].hf) == ["model.embed_tokens.weight"]
    untied = rows_by_megatron_name(_LLAMA)
    assert list(untied["output_layer.weight"].hf) == ["lm_head.weight"]


def test_only_linear_weights_of_the_decoder_may_be_fp8() -> None:
    allowed = {row.megatron.split(".", 3)[3] for row in param_rows(_QWEN3_MOE) if row.fp8}
    assert allowed == {
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
        *(f"mlp.experts.local_experts.{e}.linear_fc{fc}.weight" for e in range(3) for fc in (1, 2)),
    }


def test_qwen2_has_one_bias_row_per_layer() -> None:
    plain = {row.megatron for row in param_rows(_LLAMA)}
    biased = {
        row.megatron: row for row in param_rows(replace(_LLAMA, family="qwen2", qkv_bias=True))
    }
    bias = "decoder.layers.1.self_attention.linear_qkv.bias"
    assert set(biased) - plain == {bias, bias.replace("1", "0")}
    assert biased[bias].hf == {
        "model.layers.1.self_attn.q_proj.bias": (48,),
        "model.layers.1.self_attn.k_proj.bias": (24,),
        "model.layers.1.self_attn.v_proj.bias": (24,),
    }
