"""FP8 serving, emulated: what a server's linear layers and KV cache round, in any dtype.

    fp8-block    weights per 128 x 128 block, inputs per 1 x 128         (published FP8 models)
    fp8-tensor   one scale per weight, one per token of the input

Scales are float32, `max |x| / max_value`, as SGLang's kernels and `p3o reshard` have them. The
products are those of the rounded numbers, in the model's own dtype. SGLang's per-tensor kernels on
Hopper take one scale per output channel of a weight, which rounds a little finer than this. A KV
cache has scale 1, as a server without calibrated scales has.
"""

from collections.abc import Callable, Set
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from megatron_p3o.config import PrecisionSection
from megatron_p3o.numerics import E4M3, E5M2, FORMATS, FloatFormat, Scaling, fake_quantize
from megatron_p3o.numerics.formats import round_to_format
from megatron_p3o.numerics.scaling import PER_TENSOR
from megatron_p3o.rollout.parameters import expert_weights

_BLOCK = 128
_KV_FORMATS = {"auto": None, "fp8_e4m3": E4M3, "fp8_e5m2": E5M2}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedNumerics:
    """How an engine rounds; the default rounds nothing."""

    number_format: FloatFormat | None = None
    """Of linear layers; None leaves them alone."""
    weights: Scaling = PER_TENSOR
    inputs: Scaling | None = None
    """None leaves the inputs alone. A block of one row per token."""
    kv_cache: FloatFormat | None = None

    @classmethod
    def of(cls, precision: PrecisionSection) -> "ServedNumerics":
        kv_cache = _KV_FORMATS[precision.rollout_kv_cache]
        if not precision.rollout_is_fp8:
            return cls(kv_cache=kv_cache)
        in_blocks = precision.rollout == "fp8-block"
        inputs = Scaling((1, _BLOCK)) if in_blocks else Scaling((1, 2**62))
        return cls(
            number_format=FORMATS[precision.rollout_format],
            weights=Scaling((_BLOCK, _BLOCK) if in_blocks else None),
            inputs=inputs if precision.rollout_activations == "quantized" else None,
            kv_cache=kv_cache,
        )

    def weight(self, weight: Tensor) -> Tensor:
        """[out, in], rounded."""
        assert self.number_format is not None
        return fake_quantize(weight, self.number_format, self.weights)

    def input(self, hidden: Tensor) -> Tensor:
        """[..., in], rounded."""
        assert self.number_format is not None and self.inputs is not None
        rows, columns = self.inputs.block or (1, 1)
        scaling = Scaling((rows, min(columns, hidden.shape[-1])))
        flat = hidden.reshape(-1, hidden.shape[-1])
        return fake_quantize(flat, self.number_format, scaling).view(hidden.shape)

    def new_cache(
        self, *args: Any, kv_layers: Set[int] | None = None, **kwargs: Any
    ) -> DynamicCache:
        """An empty KV cache that holds what a server's would.

        Args:
            *args: of transformers' cache.
            kv_layers: layers whose keys and values are rounded; None: all.
            **kwargs: as `args`.
        """
        if self.kv_cache is None:
            return DynamicCache(*args, **kwargs)
        return _RoundingCache(self.kv_cache, kv_layers, *args, **kwargs)


EXACT = ServedNumerics()


class _RoundingCache(DynamicCache):
    """Rounds keys and values as they come in; rounding what is rounded changes nothing."""

    def __init__(
        self, number_format: FloatFormat, layers: Set[int] | None, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._number_format = number_format
        self._rounded_layers = layers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self._rounded_layers is None or layer_idx in self._rounded_layers:
            key_states = round_to_format(key_states, self._number_format)
            value_states = round_to_format(value_states, self._number_format)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def round_inputs(model: PreTrainedModel, names: Set[str], numerics: ServedNumerics) -> ExitStack:
    """Make the linear layers of these weights round what goes into them.

    Args:
        model: its modules are changed in place.
        names: checkpoint names of the weights that are served in the small format. All experts of
            a layer are, or none.
        numerics: what is done to inputs.

    Returns:
        What takes the rounding out again when it is closed; it may be dropped.
    """
    undo = ExitStack()
    if numerics.number_format is None or numerics.inputs is None:
        return undo

    def round_first(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (numerics.input(arguments[0]), *arguments[1:])

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and f"{name}.weight" in names:
            undo.callback(module.register_forward_pre_hook(round_first).remove)
        elif name.endswith(".experts") and hasattr(module, "gate_up_proj"):
            weights = expert_weights(model, name, 0)
            rounds_outer, rounds_inner = weights["gate"] in names, weights["down"] in names
            if rounds_outer or rounds_inner:
                outer = numerics.input if rounds_outer else _unchanged
                inner = numerics.input if rounds_inner else _unchanged
                module.forward = partial(_experts, module, outer, inner)
                undo.callback(delattr, module, "forward")
    return undo


def _unchanged(hidden: Tensor) -> Tensor:
    return hidden


def _experts(
    module: Any,
    round_outer: Callable[[Tensor], Tensor],
    round_inner: Callable[[Tensor], Tensor],
    hidden_TH: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """transformers' experts, one after another, with the inputs of gate and up, and of down,
    rounded."""
    total_TH = torch.zeros_like(hidden_TH)
    inputs_TH = round_outer(hidden_TH)
    for expert in top_k_index.unique().tolist():
        token, choice = torch.where(top_k_index == expert)
        gate, up = (inputs_TH[token] @ module.gate_up_proj[expert].t()).chunk(2, dim=-1)
        inner = round_inner(module.act_fn(gate) * up)
        output = (inner @ module.down_proj[expert].t()) * top_k_weights[token, choice, None]
        total_TH.index_add_(0, token, output.to(total_TH.dtype))
    return total_TH
