"""Reading a model directory: what is understood, and what is refused by name."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from safetensors.torch import save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_p3o.architecture import (
    ModelArchitecture,
    MoeArchitecture,
    padded_vocab_size,
    read_architecture,
)
from megatron_p3o.errors import InputError
from megatron_p3o.model_files import fingerprint

_LLAMA: dict[str, Any] = {  # as transformers 5 writes it
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.04,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": None,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "transformers_version": "5.24.0",
    "use_cache": True,
    "vocab_size": 49152,
}
_QWEN3: dict[str, Any] = {  # as transformers 4 writes it
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_QWEN3_MOE: dict[str, Any] = {
    **_QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 6,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
_LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write_model_dir(directory: Path, config: dict[str, Any], *, drop: str | None = None) -> Path:
    kept = {key: value for key, value in config.items() if key != drop}
    (directory / "config.json").write_text(json.dumps(kept))
    save_file({"model.norm.weight": torch.ones(8)}, directory / "model.safetensors")
    return directory


def test_reads_the_transformers_5_spelling(tmp_path: Path) -> None:
    assert read_architecture(write_model_dir(tmp_path, _LLAMA)) == ModelArchitecture(
        family="llama",
        num_layers=30,
        hidden_size=576,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        ffn_hidden_size=1536,
        vocab_size=49152,
        max_position_embeddings=8192,
        norm_epsilon=1e-5,
        rope_theta=100000.0,
        rope_scaling=None,
        tie_word_embeddings=True,
        qkv_bias=False,
        qk_layernorm=False,
        initializer_range=0.04,
        eos_token_ids=(2,),
        torch_dtype="bfloat16",
    )


def test_reads_the_transformers_4_spelling(tmp_path: Path) -> None:
    assert read_architecture(write_model_dir(tmp_path, _QWEN3)) == ModelArchitecture(
        family="qwen3",
        num_layers=28,
        hidden_size=1024,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        ffn_hidden_size=3072,
        vocab_size=151936,
        max_position_embeddings=40960,
        norm_epsilon=1e-6,
        rope_theta=1000000.0,
        rope_scaling=None,
        tie_word_embeddings=True,
        qkv_bias=False,
        qk_layernorm=True,
        initializer_range=0.02,
        eos_token_ids=(151645,),
        torch_dtype="bfloat16",
    )


def test_reads_a_mixture_of_experts(tmp_path: Path) -> None:
    architecture = read_architecture(write_model_dir(tmp_path, _QWEN3_MOE))
    assert (architecture.family, architecture.qk_layernorm) == ("qwen3_moe", True)
    assert architecture.moe == MoeArchitecture(
        num_experts=128,
        experts_per_token=8,
        ffn_hidden_size=768,
        normalize_topk=True,
        layers=(0, 1, 2, 3, 4, 5),
    )


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1, 2]}, (3, 5)),
        ({"mlp_only_layers": [0, 5]}, (1, 2, 3, 4)),
        ({"mlp_only_layers": None}, (0, 1, 2, 3, 4, 5)),
        # As transformers 5 may name it.
        ({"num_experts": None, "num_local_experts": 128}, (0, 1, 2, 3, 4, 5)),
    ],
)
def test_which_layers_are_mixtures(
    tmp_path: Path, changes: dict[str, Any], layers: tuple[int, ...]
) -> None:
    moe = read_architecture(write_model_dir(tmp_path, _QWEN3_MOE | changes)).moe
    assert moe is not None
    assert (moe.layers, moe.num_experts) == (layers, 128)


def test_a_mixture_without_mixture_layers_is_dense(tmp_path: Path) -> None:
    config = _QWEN3_MOE | {"decoder_sparse_step": 7}
    assert read_architecture(write_model_dir(tmp_path, config)).moe is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": None}, "num_experts must be given once"),
        ({"num_local_experts": 64}, "num_experts must be given once"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok=129 must be <= num_experts=128"),
        ({"num_experts_per_tok": 1}, "norm_topk_prob=true with num_experts_per_tok=1"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size=None must be a positive integer"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers='0' must be a list"),
        ({"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size=8 is not known"),
    ],
)
def test_mixtures_that_cannot_be_trained(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        read_architecture(write_model_dir(tmp_path, _QWEN3_MOE | changes))


@pytest.mark.parametrize(
    ("config", "dropped", "field", "value"),
    [
        (_LLAMA, "head_dim", "head_dim", 64),
        (
            _QWEN3 | {"num_attention_heads": 4, "num_key_value_heads": 4},
            "head_dim",
            "head_dim",
            128,
        ),
        (_LLAMA, "num_key_value_heads", "num_key_value_heads", 9),
        (_LLAMA, "rope_parameters", "rope_theta", 10000.0),
        (_LLAMA, "tie_word_embeddings", "tie_word_embeddings", False),
        (_LLAMA, "dtype", "torch_dtype", "float32"),
        (_LLAMA, "eos_token_id", "eos_token_ids", ()),
    ],
)
def test_missing_fields_mean_what_transformers_makes_of_them(
    tmp_path: Path, config: dict[str, Any], dropped: str, field: str, value: Any
) -> None:
    architecture = read_architecture(write_model_dir(tmp_path, config, drop=dropped))
    assert getattr(architecture, field) == value


def test_generation_config_decides_the_end_tokens(tmp_path: Path) -> None:
    write_model_dir(tmp_path, _QWEN3)
    generation = tmp_path / "generation_config.json"
    generation.write_text('{"eos_token_id": [151645, 151643]}')
    assert read_architecture(tmp_path).eos_token_ids == (151645, 151643)
    generation.write_text('{"eos_token_id": null}')
    assert read_architecture(tmp_path).eos_token_ids == (151645,)


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_llama3_rope_is_what_megatron_computes(tmp_path: Path, spelling: str) -> None:
    rope = dict(_LLAMA3_ROPE)
    top: dict[str, Any] = {}
    if spelling == "rope_scaling":
        top["rope_theta"] = rope.pop("rope_theta")
        rope["type"] = rope.pop("rope_type")
    config = {**_LLAMA, "max_position_embeddings": 131072, spelling: rope, **top}
    architecture = read_architecture(write_model_dir(tmp_path, config))
    assert architecture.rope_scaling == {"rope_type": "llama3", "factor": 32.0}
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=576,
            num_attention_heads=9,
            head_dim=64,
            max_position_embeddings=131072,
            rope_parameters=dict(_LLAMA3_ROPE),
        )
    ).inv_freq
    ours = RotaryEmbedding(
        architecture.head_dim,
        rotary_percent=1.0,
        rotary_base=architecture.rope_theta,
        rope_scaling=True,
        rope_scaling_factor=architecture.rope_scaling["factor"],
        use_cpu_initialization=True,
    ).inv_freq
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
        ({"residual_multiplier": 0.22}, "residual_multiplier=0.22"),
        ({"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}, "GemmaForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": "mistral"}, "model_type='mistral'"),
        ({"num_hidden_layers": "30"}, "num_hidden_layers='30'"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"rms_norm_eps": None}, "rms_norm_eps=None"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "factor=2.0"),
        ({"rope_parameters": _LLAMA3_ROPE | {"low_freq_factor": 2.0}}, "low_freq_factor=2.0"),
        (
            {"rope_parameters": _LLAMA3_ROPE | {"original_max_position_embeddings": 4096}},
            "original_max_position_embeddings=4096",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_computations_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(InputError) as caught:
        read_architecture(write_model_dir(tmp_path, {**_LLAMA, **change}))
    assert named in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_an_unsupported_architecture_is_told_what_is_supported(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="LlamaForCausalLM or Qwen2ForCausalLM or Qwen3ForCausalLM"
    ):
        read_architecture(
            write_model_dir(tmp_path, {**_LLAMA, "architectures": ["GPT2LMHeadModel"]})
        )


def test_missing_or_broken_configuration(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such directory"):
        read_architecture(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"config\.json cannot be read"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": ')
    with pytest.raises(InputError, match=r"config\.json is not JSON"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match="JSON object"):
        read_architecture(tmp_path)


def test_missing_weights(tmp_path: Path) -> None:
    write_model_dir(tmp_path, _LLAMA)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match="neither"):
        read_architecture(tmp_path)


def test_config_json_alone_says_the_architecture(tmp_path: Path) -> None:
    write_model_dir(tmp_path, _LLAMA)
    whole = read_architecture(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert read_architecture(tmp_path, with_weights=False) == whole


def test_index_must_match_its_shards(tmp_path: Path) -> None:
    write_model_dir(tmp_path, _LLAMA)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    weight_map = {"model.norm.weight": "a.safetensors"}
    index.write_text(json.dumps({"weight_map": weight_map}))
    read_architecture(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map | {"lm_head.weight": "b.safetensors"}}))
    with pytest.raises(InputError, match=r"b\.safetensors, which is missing"):
        read_architecture(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map | {"lm_head.weight": "a.safetensors"}}))
    with pytest.raises(InputError, match=r"lm_head\.weight in a\.safetensors, which lacks it"):
        read_architecture(tmp_path)


@given(data=st.data())
def test_any_cut_weight_file_is_half_written(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    model_dir = write_model_dir(tmp_path_factory.mktemp("model"), _LLAMA)
    path = model_dir / "model.safetensors"
    os.truncate(path, data.draw(st.integers(0, path.stat().st_size - 1)))
    with pytest.raises(InputError, match=r"model\.safetensors is (half-written|not a safetensors)"):
        read_architecture(model_dir)


def test_a_git_lfs_pointer_is_not_a_weight_file(tmp_path: Path) -> None:
    write_model_dir(tmp_path, _LLAMA)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(InputError, match="Git LFS"):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("vocab_size", "tensor", "padded"),
    [(49152, 1, 49152), (100, 1, 128), (128, 1, 128), (129, 2, 256), (151936, 4, 152064)],
)
def test_padded_vocab_size(vocab_size: int, tensor: int, padded: int) -> None:
    assert padded_vocab_size(vocab_size, tensor) == padded


def test_fingerprint_tells_models_apart(tmp_path: Path) -> None:
    write_model_dir(tmp_path, _LLAMA)
    path = tmp_path / "model.safetensors"
    seen = [fingerprint(tmp_path)]
    os.utime(path)
    assert fingerprint(tmp_path) == seen[0]
    # The same names and shapes with other values.
    save_file({"model.norm.weight": torch.ones(8).index_fill(0, torch.tensor([7]), 2.0)}, path)
    seen.append(fingerprint(tmp_path))
    save_file({"model.norm.weight": torch.ones(9)}, path)
    seen.append(fingerprint(tmp_path))
    write_model_dir(tmp_path, {**_LLAMA, "rms_norm_eps": 1e-6})
    seen.append(fingerprint(tmp_path))
    assert len(set(seen)) == len(seen)
