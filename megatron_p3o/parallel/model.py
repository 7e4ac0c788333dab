"""Megatron's GPTModel for an architecture read from Hugging Face, wrapped for data parallelism.

On CUDA the layers follow Megatron's Transformer Engine spec, on the CPU its local spec. A rank
holds one model chunk, or several with a virtual pipeline. The last chunk of the last pipeline stage
returns hidden states, not logits: `parallel.logprobs` applies the output weight to the response
tokens alone, chunk by chunk.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as megatron_finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_p3o.architecture import ModelArchitecture, padded_vocab_size
from megatron_p3o.config import LayoutSection, RunConfig
from megatron_p3o.parallel import cpu
from megatron_p3o.parallel.setup import ParallelContext

_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)")
# Local experts of Megatron's SequentialMLP, or of Transformer Engine's grouped linear layers.
_EXPERT = re.compile(r"(\.local_experts\.|\.experts\.linear_fc[12]\.weight)(\d+)")

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class PolicyModel:
    """This rank's part of the model: its chunks, each under Megatron's DistributedDataParallel."""

    def __init__(
        self, modules: Sequence[GPTModel], context: ParallelContext, config: RunConfig
    ) -> None:
        self.modules = tuple(modules)
        self.config: TransformerConfig = modules[0].config
        self.chunks = [
            DistributedDataParallel(
                config=self.config,
                ddp_config=DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True,
                    # Gradients travel while the rest of the backward pass computes.
                    overlap_grad_reduce=True,
                    use_distributed_optimizer=config.optimizer.distributed,
                ),
                module=module,
            )
            for module in modules
        ]
        self.config.finalize_model_grads_func = megatron_finalize_model_grads
        no_sync = [chunk.no_sync for chunk in self.chunks]
        self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        num_experts = self.config.num_moe_experts or 0
        self._first_expert = (
            context.expert_coordinates.expert * num_experts // context.layout.expert
        )

    @property
    def wrapped(self) -> DistributedDataParallel:
        """The only chunk of a rank without a virtual pipeline."""
        (chunk,) = self.chunks
        return chunk

    def zero_grad_buffers(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def output_weight(self) -> Tensor:
        """[padded vocab / tensor, H]; the embedding where the two are tied. Last stage only."""
        module = self.modules[-1]
        if module.share_embeddings_and_output_weights:
            return module.shared_embedding_or_output_weight()
        return module.output_layer.weight

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Global Megatron names and local parameters.

        Layers are counted over all stages and chunks, experts over all expert ranks.
        """
        for module in self.modules:
            first_layer = _first_layer(module)
            for name, parameter in module.named_parameters():
                name = _shift(_LAYER, name, first_layer)
                yield _shift(_EXPERT, name, self._first_expert), parameter


def build_model(
    architecture: ModelArchitecture, context: ParallelContext, config: RunConfig
) -> PolicyModel:
    """Build this rank's part; parameters are uninitialised until weights are loaded."""
    transformer_config = make_transformer_config(architecture, context, config)
    num_chunks = context.layout.virtual_pipeline
    messages_are_ordered = transformer_config.overlap_p2p_comm, transformer_config.batch_p2p_comm
    assert num_chunks == 1 or messages_are_ordered == (True, False)
    modules = [
        _build_chunk(architecture, context, transformer_config, index)
        for index in range(num_chunks)
    ]
    return PolicyModel(modules, context, config)


def _build_chunk(
    architecture: ModelArchitecture,
    context: ParallelContext,
    transformer_config: TransformerConfig,
    index: int,
) -> GPTModel:
    num_chunks = context.layout.virtual_pipeline
    virtual_stage = index if num_chunks > 1 else None
    is_last = context.is_last_stage and index == num_chunks - 1
    module = GPTModel(
        config=transformer_config,
        transformer_layer_spec=_layer_spec(transformer_config, context.device, virtual_stage),
        vocab_size=padded_vocab_size(architecture.vocab_size, context.layout.tensor),
        max_sequence_length=architecture.max_position_embeddings,
        pre_process=context.is_first_stage and index == 0,
        post_process=is_last,
        share_embeddings_and_output_weights=architecture.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,  # type: ignore[arg-type]
        vp_stage=virtual_stage,
        **_rope_scaling(architecture),
    ).to(device=context.device, dtype=transformer_config.params_dtype)
    if is_last:
        module.output_layer.forward = (
            _gather_hidden_states if transformer_config.sequence_parallel else _pass_hidden_states
        )
    for name, parameter in module.named_parameters():
        if _EXPERT.search(name):
            # Megatron marks experts only when expert > 1, but their copies also lie on other
            # ranks than those of the dense layers when expert_tensor differs from tensor.
            parameter.allreduce = False  # type: ignore[attr-defined]
    return module


def make_transformer_config(
    architecture: ModelArchitecture, context: ParallelContext, config: RunConfig
) -> TransformerConfig:
    """Megatron's own configuration object, every architecture field from the Hugging Face one."""
    fields = {
        **_architecture_fields(architecture),
        **_layout_fields(config.layout),
        **_moe_fields(architecture, context, config),
        **_training_fields(config),
    }
    if context.device.type == "cpu":
        fields |= cpu.transformer_config_overrides()
    return TransformerConfig(**fields)


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
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Weights come from a checkpoint; drawing random ones first would be wasted time. Not by
        # perform_initialization=False: that also skips marking parameters as tensor-parallel,
        # and the gradient norm then counts only the first rank's shards.
        "init_method": _leave_uninitialised,
        "output_layer_init_method": _leave_uninitialised,
        "embedding_init_method": _leave_uninitialised,
    }


def _layout_fields(layout: LayoutSection) -> dict[str, Any]:
    fields = {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "sequence_parallel": layout.sequence_parallel,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers,
        "account_for_embedding_in_pipeline_split": layout.account_for_embedding,
        "account_for_loss_in_pipeline_split": layout.account_for_loss,
        # Microbatches are padded to their own longest sequence.
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
        # A softmax over the chosen experts is the softmax over all, normalised over the chosen.
        "moe_router_pre_softmax": not moe.normalize_topk,
        "moe_layer_freq": 1 if all(pattern) else pattern,
        "moe_grouped_gemm": context.device.type == "cuda",
        "moe_router_load_balancing_type": "aux_loss" if coefficient > 0 else "none",
        "moe_aux_loss_coeff": coefficient,
        "expert_model_parallel_size": config.layout.expert,
        "expert_tensor_parallel_size": config.layout.expert_tensor,
    }


def _training_fields(config: RunConfig) -> dict[str, Any]:
    dtype = _DTYPES[config.precision.trainer]
    fields: dict[str, Any] = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "attention_softmax_in_fp32": True,
        # The loss returns a sum and a token count; Megatron divides once per optimizer step.
        "calculate_per_token_loss": True,
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


def _layer_spec(
    config: TransformerConfig, device: torch.device, virtual_stage: int | None
) -> TransformerBlockSubmodules:
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=device.type == "cuda",
        normalization=config.normalization,
        vp_stage=virtual_stage,
    )
    if device.type == "cpu":
        cpu.adapt_layer_spec(spec)
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


def _gather_hidden_states(
    hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
) -> tuple[Tensor, None]:
    """As `_pass_hidden_states`, for sequence shards [S / tensor, B, H]: gives the whole sequence.

    `parallel.logprobs` hands every tensor rank the complete gradient, so each takes back its own
    positions' and nothing is summed.
    """
    return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False), None


def _first_layer(module: GPTModel) -> int:
    """Global index of the chunk's first layer."""
    layers = module.decoder.layers
    # Megatron numbers layers globally, from 1.
    return layers[0].layer_number - 1 if len(layers) else 0


def _shift(pattern: re.Pattern[str], name: str, by: int) -> str:
    """The name with the pattern's second group, a number, raised."""
    return pattern.sub(lambda match: f"{match[1]}{int(match[2]) + by}", name)
