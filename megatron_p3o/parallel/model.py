"""Megatron's GPTModel for an architecture read from Hugging Face, wrapped for data parallelism.

On CUDA the layers follow Megatron's Transformer Engine spec, on the CPU its local spec. The last
pipeline stage returns hidden states, not logits: `parallel.logprobs` applies the output weight to
the response tokens alone, chunk by chunk.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as megatron_finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_p3o.architecture import ModelArchitecture, padded_vocab_size
from megatron_p3o.config import RunConfig
from megatron_p3o.parallel import cpu
from megatron_p3o.parallel.setup import ParallelContext

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class PolicyModel:
    """This rank's part of the model, under Megatron's DistributedDataParallel."""

    def __init__(
        self,
        module: GPTModel,
        context: ParallelContext,
        config: RunConfig,
        *,
        frozen: bool = False,
    ) -> None:
        self.module = module
        self._layer_offset = _first_layer(module, context)
        if frozen:  # no gradients, so no buffers for them either
            self.wrapped: Any = module.requires_grad_(False)
            return
        self.wrapped = DistributedDataParallel(
            config=module.config,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=config.optimizer.distributed,
            ),
            module=module,
        )
        module.config.finalize_model_grads_func = megatron_finalize_model_grads

    def output_weight(self) -> Tensor:
        """[padded vocab / tensor, H]; the embedding where the two are tied. Last stage only."""
        if self.module.share_embeddings_and_output_weights:
            return self.module.shared_embedding_or_output_weight()
        return self.module.output_layer.weight

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Global Megatron names (layers counted over all stages) and local parameters."""
        for name, parameter in self.module.named_parameters():
            yield self._global_name(name), parameter

    def _global_name(self, name: str) -> str:
        return _LAYER.sub(
            lambda match: f"decoder.layers.{int(match[1]) + self._layer_offset}.", name
        )


def build_model(
    architecture: ModelArchitecture,
    context: ParallelContext,
    config: RunConfig,
    *,
    frozen: bool = False,
) -> PolicyModel:
    """Build this rank's part; parameters are uninitialised until weights are loaded.

    A frozen model only scores: it has no gradient buffers and cannot be trained.
    """
    transformer_config = make_transformer_config(architecture, context, config)
    module = GPTModel(
        config=transformer_config,
        transformer_layer_spec=_layer_spec(transformer_config, context.device),
        vocab_size=padded_vocab_size(architecture.vocab_size, context.layout.tensor),
        max_sequence_length=architecture.max_position_embeddings,
        pre_process=context.is_first_stage,
        post_process=context.is_last_stage,
        share_embeddings_and_output_weights=architecture.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,  # type: ignore[arg-type]
        **_rope_scaling(architecture),
    ).to(device=context.device, dtype=transformer_config.params_dtype)
    if context.is_last_stage:
        module.output_layer.forward = _pass_hidden_states
    return PolicyModel(module, context, config, frozen=frozen)


def make_transformer_config(
    architecture: ModelArchitecture, context: ParallelContext, config: RunConfig
) -> TransformerConfig:
    """Megatron's own configuration object, every architecture field from the Hugging Face one."""
    dtype = _DTYPES[config.precision.trainer]
    layout = context.layout
    fields: dict[str, Any] = {
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
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Weights come from a checkpoint; drawing random ones first would be wasted time. Not by
        # perform_initialization=False: that also skips marking parameters as tensor-parallel,
        # and the gradient norm then counts only the first rank's shards.
        "init_method": _leave_uninitialised,
        "output_layer_init_method": _leave_uninitialised,
        "embedding_init_method": _leave_uninitialised,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "attention_softmax_in_fp32": True,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        # The loss returns a sum and a token count; Megatron divides once per optimizer step.
        "calculate_per_token_loss": True,
        # Microbatches are padded to their own longest sequence.
        "variable_seq_lengths": layout.pipeline > 1,
        # Megatron refuses its default dispatcher with variable lengths, even for dense models.
        "moe_token_dispatcher_type": "alltoall",
    }
    if config.train.recompute == "full":
        fields |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if context.device.type == "cpu":
        fields |= cpu.transformer_config_overrides()
    return TransformerConfig(**fields)


def _leave_uninitialised(weight: Tensor) -> Tensor:
    return weight


def _layer_spec(config: TransformerConfig, device: torch.device) -> ModuleSpec:
    if device.type == "cuda":
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    spec = get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    spec.submodules.self_attention.submodules.core_attention = cpu.CausalSdpaAttention
    return spec


def _rope_scaling(architecture: ModelArchitecture) -> dict[str, Any]:
    if architecture.rope_scaling is None:
        return {}
    return {"rope_scaling": True, "rope_scaling_factor": architecture.rope_scaling["factor"]}


def _pass_hidden_states(
    hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
) -> tuple[Tensor, None]:
    """Stands in for the output projection's forward; its parameters and hooks stay in place."""
    return hidden, None


def _first_layer(module: GPTModel, context: ParallelContext) -> int:
    """Global index of this stage's first layer."""
    layers = module.decoder.layers
    # Megatron numbers layers globally, from 1.
    return layers[0].layer_number - 1 if len(layers) else 0
