"""Norms behind attention and MLP, in front of the residual addition (GLM-4).

Megatron-Core's transformer layer has none. Here its attention and its MLP are followed by one each:
their outputs are complete there, for the row-parallel layers have been summed over tensor ranks.
"""

from typing import Any

from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class PostNormLayer(TransformerLayer):
    """Megatron's layer with `post_self_attn_layernorm` and `post_mlp_layernorm`."""

    def __init__(self, config: Any, submodules: Any, *args: Any, post_norm: Any, **kwargs: Any):
        super().__init__(config, submodules, *args, **kwargs)

        def norm() -> Any:
            return build_module(
                post_norm,
                config=config,
                hidden_size=config.hidden_size,
                eps=config.layernorm_epsilon,
            )

        self.post_self_attn_layernorm = norm()
        self.post_mlp_layernorm = norm()
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


def _without_bias(output: tuple[Tensor, Tensor | None]) -> Tensor:
    hidden, bias = output
    assert bias is None, "the layers of a model with such norms have no bias"
    return hidden
