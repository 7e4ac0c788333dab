"""FP8 training on CUDA, by Megatron-Core's own configuration fields, and what a device can do.

Transformer Engine computes; on the CPU `cpu_fp8` emulates the same recipes and none of these fields
is set. Fields are those of megatron/core/transformer/transformer_config.py,
distributed/distributed_data_parallel_config.py and optimizer/optimizer_config.py.
"""

import importlib.util
from typing import Any

import torch
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
from torch import Tensor

from megatron_p3o.config import PrecisionSection
from megatron_p3o.errors import ConfigurationError
from megatron_p3o.parallel.fp8_support import missing_support


def parameter_dtype(precision: PrecisionSection, device_type: str) -> torch.dtype:
    """Type of the parameters: bf16 beside FP8 products, fp32 where these are emulated."""
    if precision.trainer_is_fp8:
        return torch.float32 if device_type == "cpu" else torch.bfloat16
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision.trainer]


def transformer_fields(precision: PrecisionSection, device_type: str) -> dict[str, Any]:
    """TransformerConfig fields of an FP8 trainer on CUDA; none otherwise."""
    if not precision.trainer_is_fp8 or device_type == "cpu":
        return {}
    details = precision.fp8
    fields: dict[str, Any] = {
        "fp8": precision.fp8_format,
        "fp8_recipe": precision.fp8_recipe,
        "fp8_param": details.param_gather,
        "fp8_margin": details.margin,
        "fp8_amax_history_len": details.amax_history,
        "fp8_amax_compute_algo": details.amax_from,
    }
    if details.bf16_layers_at_start or details.bf16_layers_at_end:
        fields |= {
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": details.bf16_layers_at_start,
            "num_layers_at_end_in_bf16": details.bf16_layers_at_end,
        }
    return fields


def moe_fields(precision: PrecisionSection, device_type: str) -> dict[str, Any]:
    """Of a mixture of experts: an expert's tokens are filled up to what FP8 kernels take."""
    is_real = precision.trainer_is_fp8 and device_type != "cpu"
    return {"moe_router_padding_for_quantization": True} if is_real else {}


def gather_fields(precision: PrecisionSection, device_type: str) -> dict[str, bool]:
    """DistributedDataParallelConfig fields for weights that are gathered in FP8."""
    return {"fp8_param_gather": True} if precision.fp8.param_gather and device_type != "cpu" else {}


def plain(parameter: Tensor) -> Tensor:
    """The parameter as an ordinary tensor, also where it is held in FP8 alone."""
    return dequantize_fp8_tensor(parameter) if is_float8tensor(parameter) else parameter


def check_device(precision: PrecisionSection, device: torch.device) -> None:
    """
    Raises:
        ConfigurationError: the device cannot train in the configured precision.
    """
    if not precision.trainer_is_fp8:
        return
    if device.type == "cpu":
        if precision.fp8.param_gather:
            raise ConfigurationError(
                "precision.fp8.param_gather=true needs CUDA: on a CPU FP8 is emulated and weights "
                "stay in fp32; remove it"
            )
        return
    problem = missing_support(
        precision.fp8_recipe,
        torch.cuda.get_device_capability(device),
        has_transformer_engine=importlib.util.find_spec("transformer_engine") is not None,
    )
    if problem:
        raise ConfigurationError(f"precision.trainer={precision.trainer} {problem}")
