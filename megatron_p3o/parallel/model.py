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
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as megatron_finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_p3o.architecture import ModelArchitecture, padded_vocab_size
from megatron_p3o.config import RunConfig
from megatron_p3o.errors import ConfigurationError
from megatron_p3o.parallel import cpu, fp8
from megatron_p3o.parallel.cpu_fp8 import Fp8Emulation
from megatron_p3o.parallel.extra_norms import add_latent_key_norms, add_post_norms
from megatron_p3o.parallel.setup import ParallelContext
from megatron_p3o.parallel.transformer_config import make_transformer_config

_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)")
# Local experts of Megatron's SequentialMLP, or of Transformer Engine's grouped linear layers.
_EXPERT = re.compile(r"(\.local_experts\.|\.experts\.linear_fc[12]\.weight)(\d+)")


class PolicyModel:
    """This rank's part of the model: its chunks, each under Megatron's DistributedDataParallel.

    The chunks of a frozen model are bare.
    """

    def __init__(
        self,
        modules: Sequence[GPTModel],
        context: ParallelContext,
        config: RunConfig,
        *,
        frozen: bool = False,
    ) -> None:
        self.modules = tuple(modules)
        self.config: TransformerConfig = modules[0].config
        num_experts = self.config.num_moe_experts or 0
        self._first_expert = (
            context.expert_coordinates.expert * num_experts // context.layout.expert
        )
        self.fp8_emulation = _emulate_fp8(modules, config, context.device)
        """Of an FP8 trainer on the CPU."""
        self.chunks: list[Any]
        if frozen:  # no gradients, so no buffers for them either
            self.chunks = [module.requires_grad_(False) for module in modules]
            return
        self.chunks = [
            DistributedDataParallel(
                config=self.config,
                ddp_config=DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True,
                    # Gradients travel while the rest of the backward pass computes.
                    overlap_grad_reduce=True,
                    use_distributed_optimizer=config.optimizer.distributed,
                    **fp8.gather_fields(config.precision, context.device.type),
                ),
                module=module,
            )
            for module in modules
        ]
        self.config.finalize_model_grads_func = megatron_finalize_model_grads
        no_sync = [chunk.no_sync for chunk in self.chunks]
        self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    @property
    def wrapped(self) -> Any:
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

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Global Megatron names and local tensors of what a checkpoint of the model holds.

        Layers are counted over all stages and chunks, experts over all expert ranks.
        """
        for module in self.modules:
            first_layer = _first_layer(module)
            for name, parameter in (*module.named_parameters(), *_loaded_buffers(module)):
                name = _shift(_LAYER, name, first_layer)
                yield _shift(_EXPERT, name, self._first_expert), parameter


def build_model(
    architecture: ModelArchitecture,
    context: ParallelContext,
    config: RunConfig,
    *,
    frozen: bool = False,
) -> PolicyModel:
    """Build this rank's part; parameters are uninitialised until weights are loaded.

    A frozen model only scores: it has no gradient buffers and cannot be trained.

    Raises:
        ConfigurationError: the device has no kernels for the configuration.
    """
    fp8.check_device(config.precision, context.device)
    _check_attention(architecture, context, config)
    transformer_config = make_transformer_config(architecture, context, config)
    num_chunks = context.layout.virtual_pipeline
    messages_are_ordered = transformer_config.overlap_p2p_comm, transformer_config.batch_p2p_comm
    assert num_chunks == 1 or messages_are_ordered == (True, False)
    modules = [
        _build_chunk(architecture, context, transformer_config, index)
        for index in range(num_chunks)
    ]
    return PolicyModel(modules, context, config, frozen=frozen)


def _build_chunk(
    architecture: ModelArchitecture,
    context: ParallelContext,
    transformer_config: TransformerConfig,
    index: int,
) -> GPTModel:
    num_chunks = context.layout.virtual_pipeline
    virtual_stage = index if num_chunks > 1 else None
    is_last = context.is_last_stage and index == num_chunks - 1
    spec = _layer_spec(architecture, transformer_config, context.device, virtual_stage)
    module = GPTModel(
        config=transformer_config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab_size(architecture.vocab_size, context.layout.tensor),
        max_sequence_length=architecture.max_position_embeddings,
        pre_process=context.is_first_stage and index == 0,
        post_process=is_last,
        share_embeddings_and_output_weights=architecture.tie_word_embeddings,
        position_embedding_type="rope",
        vp_stage=virtual_stage,
        **_rope(architecture),
    )
    if architecture.mla is not None and architecture.mla.q_lora_rank is None:
        add_latent_key_norms(module, norm=spec.layer_norm)
    module = module.to(device=context.device, dtype=transformer_config.params_dtype)
    if is_last:
        module.output_layer.forward = (
            _gather_hidden_states if transformer_config.sequence_parallel else _pass_hidden_states
        )
    for layer in module.decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            # Its small differences decide which experts are chosen.
            layer.mlp.router._maintain_float32_expert_bias()
    for name, parameter in module.named_parameters():
        if _EXPERT.search(name):
            # Megatron marks experts only when expert > 1, but their copies also lie on other
            # ranks than those of the dense layers when expert_tensor differs from tensor.
            parameter.allreduce = False  # type: ignore[attr-defined]
    return module


def _check_attention(
    architecture: ModelArchitecture, context: ParallelContext, config: RunConfig
) -> None:
    tensor = context.layout.tensor
    if context.device.type == "cpu" and architecture.mla is not None and tensor > 1:
        raise ConfigurationError(
            f"layout.tensor={tensor} must be 1 on the CPU for a {architecture.family} model: the "
            "projections to its latents are whole on every rank with Transformer Engine, which "
            "Megatron's local layers cannot do; use layout.pipeline, layout.context or "
            "layout.expert"
        )
    if context.device.type == "cuda" and config.precision.trainer == "fp32":
        for used, field in (
            (config.train.packing, "train.packing=true"),
            (context.layout.context > 1, f"layout.context={context.layout.context}"),
        ):
            if used:
                raise ConfigurationError(
                    f"{field} needs precision.trainer=bf16 on CUDA, where Transformer Engine's "
                    f"packed and context-parallel attention know no fp32; set it or remove {field}"
                )


def _layer_spec(
    architecture: ModelArchitecture,
    config: TransformerConfig,
    device: torch.device,
    virtual_stage: int | None,
) -> TransformerBlockSubmodules:
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=device.type == "cuda",
        normalization=config.normalization,
        vp_stage=virtual_stage,
    )
    if device.type == "cpu":
        cpu.adapt_layer_spec(spec)
    if architecture.has_post_norms:
        add_post_norms(spec, norm=spec.layer_norm)
    return spec


def _emulate_fp8(
    modules: Sequence[GPTModel], config: RunConfig, device: torch.device
) -> Fp8Emulation | None:
    if device.type != "cpu" or not config.precision.trainer_is_fp8:
        return None
    # Megatron numbers layers globally, from 1.
    layers = {layer.layer_number - 1: layer for m in modules for layer in m.decoder.layers}
    return Fp8Emulation(layers, modules[0].config.num_layers, config.precision)


def _rope(architecture: ModelArchitecture) -> dict[str, Any]:
    """GPTModel's own arguments; latent attention reads them from its configuration."""
    fields: dict[str, Any] = {
        "rotary_base": architecture.rope_theta,
        "rotary_percent": architecture.rotary_fraction,
    }
    if architecture.rope_scaling is not None and architecture.mla is None:
        fields |= {"rope_scaling": True, "rope_scaling_factor": architecture.rope_scaling["factor"]}
    return fields


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


def _loaded_buffers(module: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a checkpoint that are not trained: the biases that choose experts."""
    for name, buffer in module.named_buffers():
        if name.endswith(".router.expert_bias"):
            yield name, buffer


def _shift(pattern: re.Pattern[str], name: str, by: int) -> str:
    """The name with the pattern's second group, a number, raised."""
    return pattern.sub(lambda match: f"{match[1]}{int(match[2]) + by}", name)
