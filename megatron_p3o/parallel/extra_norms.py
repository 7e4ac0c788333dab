"""Norms that some models have and Megatron-Core's layers lack.

Behind attention and MLP, in front of the residual addition (GLM-4): the outputs are complete there,
for the row-parallel layers have been summed over tensor ranks. And of the latent of keys and values
alone (DeepSeek-V2-Lite): Megatron-Core has one switch for it and the latent of the queries, and its
newer versions refuse that switch for queries without a latent.
"""

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class PostNormLayer(TransformerLayer):
    """Megatron's layer with `post_self_attn_layernorm` and `post_mlp_layernorm`."""

    def __init__(self, config: Any, submodules: Any, *args: Any, post_norm: Any, **kwargs: Any):
        super().__init__(config, submodules, *args, **kwargs)

        self.post_self_attn_layernorm = _build(post_norm, config, config.hidden_size)
        self.post_mlp_layernorm = _build(post_norm, config, config.hidden_size)
        self.self_attention.register_forward_hook(self._norm_attention)
        self.mlp.register_forward_hook(self._norm_mlp)

    def _norm_attention(
        self, module: Any, inputs: Any, output: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, None]:
        return self.post_self_attn_layernorm(_without_bias(output)), None

    def _norm_mlp(
        self, module: Any, inputs: Any, output: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, None]:
        return self.post_mlp_layernorm(_without_bias(output)), None


def add_post_norms(spec: TransformerBlockSubmodules, *, norm: Any) -> None:
    """Put `PostNormLayer` into every layer's spec, in place.

    Args:
        spec: of the layers.
        norm: class or spec of the norms.
    """
    for layer in spec.layer_specs:
        layer.module = PostNormLayer
        layer.params = {**(layer.params or {}), "post_norm": norm}


def add_latent_key_norms(module: GPTModel, *, norm: Any) -> None:
    """Give every layer's latent attention its `kv_layernorm`, in place.

    Args:
        module: built with `qk_layernorm=False`.
        norm: class or spec of the norms.
    """
    for layer in module.decoder.layers:
        config = layer.self_attention.config
        layer.self_attention.kv_layernorm = _build(norm, config, config.kv_lora_rank)


def _build(norm: Any, config: Any, size: int) -> Any:
    return build_module(norm, config=config, hidden_size=size, eps=config.layernorm_epsilon)


def _without_bias(output: tuple[Tensor, Tensor | None]) -> Tensor:
    hidden, bias = output
    assert bias is None, "the layers of a model with such norms have no bias"
    return hidden
