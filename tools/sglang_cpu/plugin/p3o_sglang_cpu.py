"""FP8 on CPUs without AMX, for SGLang 0.5.23: linear layers in plain torch.

SGLang calls `register` through its entry point `sglang.srt.plugins`. A linear layer with FP8
weights then computes what the CUDA kernels do, up to their order of summation: activations are
quantised to e4m3 per token (in groups of the block's columns for block FP8), both factors are
multiplied by their scales, and the product is taken in fp32. Slow; for development and CI.

Weights keep the checkpoint's layout, so that weight updates find the tensors that they replace.
"""

import os
from typing import Any

import torch
from torch import Tensor

_E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST_AMAX = 1e-10


def register() -> None:
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    # SGLang's own modules, importable only where its plugins are loaded.
    from sglang.srt.layers.quantization import fp8
    from sglang.srt.mem_cache import kv_cache_configurator

    method = fp8.Fp8LinearMethod
    unpatched = method.process_weights_after_loading

    def process_weights_after_loading(self: Any, layer: torch.nn.Module) -> None:
        if not self.block_quant:
            _without_amx_packing(fp8, lambda: unpatched(self, layer))

    def apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        block = self.weight_block_size if self.block_quant else None
        weight = _block_weight(layer, block) if block else _tensor_weight(layer, x.shape[-1])
        output = quantized_rows(x, block[1] if block else x.shape[-1]) @ weight.t()
        if bias is not None:
            output += bias.float()
        return output.to(x.dtype)

    method.process_weights_after_loading = process_weights_after_loading
    method.apply = apply
    # fp32 activations let tests compare without the rounding of bf16.
    fp8.Fp8Config.get_supported_act_dtypes = classmethod(
        lambda cls: [torch.bfloat16, torch.half, torch.float32]
    )
    # An FP8 KV cache is refused without AMX, though the torch backend only stores it.
    kv_cache_configurator.cpu_has_amx_support = lambda: True
    kv_cache_configurator.attention_backends = lambda: ("intel_amx",)


def quantized_rows(x: Tensor, group: int) -> Tensor:
    """[..., features] after a round trip through e4m3 with one scale per row and group, fp32."""
    groups = x.float().reshape(*x.shape[:-1], -1, group)
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(_SMALLEST_AMAX) / _E4M3_MAX
    rounded = (groups / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    return (rounded.float() * scale).reshape(x.shape)


def _block_weight(layer: Any, block: tuple[int, int]) -> Tensor:
    """[out, in] fp32."""
    rows, columns = layer.weight.shape
    scale = layer.weight_scale_inv.repeat_interleave(block[0], 0)[:rows]
    return layer.weight.float() * scale.repeat_interleave(block[1], 1)[:, :columns]


def _tensor_weight(layer: Any, in_features: int) -> Tensor:
    """[out, in] fp32 of a weight with one scale, or one per output; SGLang may hold it turned."""
    weight, scale = layer.weight.float(), layer.weight_scale.float().reshape(-1)
    is_turned = weight.shape[1] != in_features or (
        weight.shape[0] == in_features and scale.numel() == weight.shape[1] > 1
    )
    if is_turned:
        weight = weight.t()
    return weight * (scale[:, None] if scale.numel() > 1 else scale)


def _without_amx_packing(fp8: Any, load: Any) -> None:
    """Run SGLang's loading as on a CPU with AMX, but leave the weights unpacked."""
    packing, has_amx = fp8._amx_process_weight_after_loading, fp8._is_cpu_amx_available
    fp8._amx_process_weight_after_loading = lambda *arguments, **keywords: None
    fp8._is_cpu_amx_available = True
    try:
        load()
    finally:
        fp8._amx_process_weight_after_loading, fp8._is_cpu_amx_available = packing, has_amx
