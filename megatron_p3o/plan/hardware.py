"""GPUs by their vendor's data sheets.

Rates are dense: data sheets of Hopper and Blackwell print twice as much, for 2:4 sparsity. Memory
is the data sheet's number of GB, 10^9 bytes (a driver shows a few percent more). Links are bytes a
second in one direction, half of the total that is advertised for NVLink, and one network adapter
for each GPU as in the vendor's DGX machines.

    a100   A100 80GB SXM, DGX A100 (8 x HDR InfiniBand 200 Gb/s)
    h100   H100 SXM5, DGX H100 (8 x NDR InfiniBand 400 Gb/s)
    h200   H200 SXM, DGX H200 (as DGX H100)
    b200   B200, DGX B200 (8 x 400 Gb/s; 1,440 GB, 64 TB/s and 72 PFLOP/s sparse FP8 for 8 GPUs)
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_p3o.errors import ConfigurationError

_TERA = 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    fp32_flops: float
    """A second, outside the tensor cores."""
    bf16_flops: float
    fp8_flops: float | None
    """None: the GPU has no FP8."""
    memory_bytes: float
    hbm_bytes_s: float
    nvlink_bytes_s: float
    network_bytes_s: float

    def peak(self, precision: str) -> float:
        """FLOP/s of products in a precision; without FP8 units, those of bf16."""
        if precision == "fp32":
            return self.fp32_flops
        if precision.startswith("fp8") and self.fp8_flops is not None:
            return self.fp8_flops
        return self.bf16_flops


GPUS: Mapping[str, Gpu] = {
    "a100": Gpu(
        fp32_flops=19.5 * _TERA,
        bf16_flops=312 * _TERA,
        fp8_flops=None,
        memory_bytes=80e9,
        hbm_bytes_s=2.039 * _TERA,
        nvlink_bytes_s=300e9,
        network_bytes_s=25e9,
    ),
    "h100": Gpu(
        fp32_flops=67 * _TERA,
        bf16_flops=989.5 * _TERA,
        fp8_flops=1979 * _TERA,
        memory_bytes=80e9,
        hbm_bytes_s=3.35 * _TERA,
        nvlink_bytes_s=450e9,
        network_bytes_s=50e9,
    ),
    "h200": Gpu(
        fp32_flops=67 * _TERA,
        bf16_flops=989.5 * _TERA,
        fp8_flops=1979 * _TERA,
        memory_bytes=141e9,
        hbm_bytes_s=4.8 * _TERA,
        nvlink_bytes_s=450e9,
        network_bytes_s=50e9,
    ),
    "b200": Gpu(
        fp32_flops=75 * _TERA,
        bf16_flops=2250 * _TERA,
        fp8_flops=4500 * _TERA,
        memory_bytes=180e9,
        hbm_bytes_s=8 * _TERA,
        nvlink_bytes_s=900e9,
        network_bytes_s=50e9,
    ),
}


def find_gpu(name: str) -> Gpu:
    """
    Raises:
        ConfigurationError: there is no such GPU in the table.
    """
    if name not in GPUS:
        raise ConfigurationError(
            f"--gpu={name!r} is not in the table; use one of {', '.join(GPUS)}, and "
            "--gpu-memory-gb for its memory"
        )
    return GPUS[name]
