"""Reading GLM-4.5 and DeepSeek-V3: routers, latent attention, partial rope, further tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_p3o.architecture import MlaArchitecture, MoeArchitecture, read_architecture
from megatron_p3o.errors import InputError
from tests.unit.test_architecture import write_model_dir

_DEEPSEEK_V3: dict[str, Any] = {  # as its authors write it, without FP8
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
_GLM4_MOE: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 0,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}


def test_reads_latent_attention_and_sigmoid_routing(tmp_path: Path) -> None:
    architecture = read_architecture(write_model_dir(tmp_path, _DEEPSEEK_V3))
    assert architecture.mla == MlaArchitecture(
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    assert architecture.moe == MoeArchitecture(
        num_experts=256,
        experts_per_token=8,
        ffn_hidden_size=2048,
        normalize_topk=True,
        layers=tuple(range(3, 61)),
        shared_ffn_hidden_size=2048,
        has_expert_bias=True,
        score_function="sigmoid",
        scaling_factor=2.5,
        num_groups=8,
        groups_per_token=4,
    )
    assert architecture.rope_scaling == {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    assert (architecture.num_mtp_layers, architecture.rotary_fraction) == (0, 1.0)


def test_reads_partial_rope_and_biases(tmp_path: Path) -> None:
    architecture = read_architecture(write_model_dir(tmp_path, _GLM4_MOE))
    assert (architecture.rotary_fraction, architecture.rotary_interleaved) == (0.5, False)
    assert (architecture.qkv_bias, architecture.qk_layernorm) == (True, False)
    assert not architecture.has_post_norms
    assert architecture.moe is not None and architecture.moe.layers == tuple(range(1, 46))


def test_a_layer_that_predicts_further_tokens_is_not_lost(tmp_path: Path) -> None:
    write_model_dir(tmp_path, _DEEPSEEK_V3)
    weights = {"model.layers.60.x": torch.ones(1), "model.layers.61.enorm.weight": torch.ones(1)}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"the weights hold model\.layers\.61\.\*, a layer that"):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (_DEEPSEEK_V3, {"norm_topk_prob": False}, "norm_topk_prob=false with num_experts_per_tok"),
        (_DEEPSEEK_V3, {"n_group": 3}, "n_group=3 must divide n_routed_experts=256"),
        (_DEEPSEEK_V3, {"topk_group": 9}, "be >= topk_group=9"),
        (_DEEPSEEK_V3, {"topk_group": 2}, "topk_group=2 with num_experts_per_tok=8 is not"),
        (_DEEPSEEK_V3, {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05 is not supported, it must be"),
        (_DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        (_DEEPSEEK_V3, {"rope_interleave": False}, "rope_interleave=False is not supported"),
        (_DEEPSEEK_V3, {"head_dim": 192}, "head_dim=192 is not supported, it must be 64"),
        (_DEEPSEEK_V3, {"quantization_config": {}}, "quantization_config={} is not known"),
        (
            _DEEPSEEK_V3,
            {"rope_scaling": {"type": "llama3", "factor": 8.0}},
            "rope_type='llama3' is not supported; use default or yarn",
        ),
        (
            _DEEPSEEK_V3,
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 40,
                    "original_max_position_embeddings": 4096,
                    "mscale": 1.0,
                }
            },
            "mscale_all_dim=None must be a number above 0",
        ),
        (_GLM4_MOE, {"n_shared_experts": None}, "n_shared_experts=None must be a positive integer"),
        (_GLM4_MOE, {"num_experts_per_tok": 1}, "norm_topk_prob=true with num_experts_per_tok=1"),
        (_GLM4_MOE, {"first_k_dense_replace": -1}, "first_k_dense_replace=-1 must be an integer"),
    ],
)
def test_what_other_families_may_not_hold(
    tmp_path: Path, config: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        read_architecture(write_model_dir(tmp_path, {**config, **change}))
    assert message in str(caught.value)
