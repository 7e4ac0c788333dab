"""Megatron's configuration object from the model's architecture and the run's configuration."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from megatron_p3o.architecture import MlaArchitecture, ModelArchitecture
from megatron_p3o.config import LayoutSection, RunConfig
from megatron_p3o.parallel import cpu, fp8
from megatron_p3o.parallel.setup import ParallelContext


def make_transformer_config(
    architecture: ModelArchitecture, context: ParallelContext, config: RunConfig
) -> TransformerConfig:
    """Megatron's own configuration object, every architecture field from the Hugging Face one."""
    fields = {
        **_architecture_fields(architecture),
        **_layout_fields(config.layout),
        **_moe_fields(architecture, context, config),
        **_training_fields(config, context.device.type),
    }
    if context.device.type == "cpu":
        fields |= cpu.transformer_config_overrides()
    if architecture.mla is None:
        return TransformerConfig(**fields)
    # Names are replaced where latent attention has its own of the same meaning.
    return MLATransformerConfig(**fields | _latent_fields(architecture, architecture.mla))


def _architecture_fields(architecture: ModelArchitecture) -> dict[str, Any]:
    return {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "num_attention_heads": architecture.num_attention_heads,
        "num_query_groups": architecture.num_key_value_heads,
        "kv_channels": architecture.head_dim,
        "ffn_hidden_size": architecture.ffn_hidden_size,
        "layernorm_epsilon": architecture.norm_epsilon,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": architecture.qkv_bias,
        "qk_layernorm": architecture.qk_layernorm,
        "rotary_interleaved": architecture.rotary_interleaved,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Weights come from a checkpoint; drawing random ones first would be wasted time. Not by
        # perform_initialization=False: that also skips marking parameters as tensor-parallel,
        # and the gradient norm then counts only the first rank's shards.
        "init_method": _leave_uninitialised,
        "output_layer_init_method": _leave_uninitialised,
        "embedding_init_method": _leave_uninitialised,
    }


def _latent_fields(architecture: ModelArchitecture, mla: MlaArchitecture) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "multi_latent_attention": True,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        # The norms of both latents; `extra_norms` adds that of the keys alone.
        "qk_layernorm": mla.q_lora_rank is not None,
        "rotary_base": architecture.rope_theta,
        # Of yarn, which also scales the softmax by it; 1 scales nothing.
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
    }
    if architecture.rope_scaling is not None:
        yarn = dict(architecture.rope_scaling)
        yarn["rotary_scaling_factor"] = yarn.pop("factor")
        fields |= {**yarn, "rope_type": yarn.pop("rope_type")}
    return fields


def _layout_fields(layout: LayoutSection) -> dict[str, Any]:
    fields = {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "context_parallel_size": layout.context,
        # Ring exchange of keys and values, which needs no number of heads to divide.
        "cp_comm_type": "p2p",
        "sequence_parallel": layout.sequence_parallel,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers,
        "account_for_embedding_in_pipeline_split": layout.account_for_embedding,
        "account_for_loss_in_pipeline_split": layout.account_for_loss,
        # Microbatches have their own length: the longest sequence's, or the pack's.
        "variable_seq_lengths": layout.pipeline > 1,
    }
    if layout.virtual_pipeline > 1:
        fields |= {
            "virtual_pipeline_model_parallel_size": layout.virtual_pipeline,
            # With two stages both neighbours are the same rank, and a batch of sends and receives
            # in both directions pairs the wrong ones: losses and gradients go wrong in silence.
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    return fields


def _moe_fields(
    architecture: ModelArchitecture, context: ParallelContext, config: RunConfig
) -> dict[str, Any]:
    # Megatron refuses its default dispatcher with variable lengths, even for dense models.
    fields: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall"}
    moe = architecture.moe
    if moe is None:
        return fields
    coefficient = config.model.moe_aux_loss_coefficient
    pattern = [int(layer in moe.layers) for layer in range(architecture.num_layers)]
    return fields | {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.experts_per_token,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_router_score_function": moe.score_function,
        # A softmax over the chosen experts is the softmax over all, normalised over the chosen.
        "moe_router_pre_softmax": moe.score_function == "softmax" and not moe.normalize_topk,
        "moe_router_topk_scaling_factor": None if moe.scaling_factor == 1 else moe.scaling_factor,
        "moe_router_num_groups": moe.num_groups if moe.num_groups > 1 else None,
        "moe_router_group_topk": moe.groups_per_token if moe.num_groups > 1 else None,
        "moe_router_enable_expert_bias": moe.has_expert_bias,
        # The bias belongs to the rollout's routing as well, so it stays as it was loaded.
        "moe_router_bias_update_rate": 0.0,
        # Models with shared experts score in fp32, whatever their weights are.
        "moe_router_dtype": "fp32" if moe.shared_ffn_hidden_size else None,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_layer_freq": 1 if all(pattern) else pattern,
        "moe_grouped_gemm": context.device.type == "cuda",
        "moe_router_load_balancing_type": "aux_loss" if coefficient > 0 else "none",
        "moe_aux_loss_coeff": coefficient,
        "expert_model_parallel_size": config.layout.expert,
        "expert_tensor_parallel_size": config.layout.expert_tensor,
        **fp8.moe_fields(config.precision, context.device.type),
    }


def _training_fields(config: RunConfig, device_type: str) -> dict[str, Any]:
    dtype = fp8.parameter_dtype(config.precision, device_type)
    fields: dict[str, Any] = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "attention_softmax_in_fp32": True,
        # The loss returns a sum and a token count; Megatron divides once per optimizer step.
        "calculate_per_token_loss": True,
        **fp8.transformer_fields(config.precision, device_type),
    }
    if config.train.recompute == "full":
        fields |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    elif config.train.recompute == "selective":
        fields |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return fields


def _leave_uninitialised(weight: Tensor) -> Tensor:
    return weight
