"""Small floating-point formats, and rounding to them.

e4m3 is the variant without infinities (float8_e4m3fn), e5m2 the IEEE-like one, e2m1 the four-bit
format of the OCP Microscaling specification. Rounding is to the nearest, ties to even, and
saturates: larger numbers become the largest of the format, as FP8 kernels cast.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A sign, some exponent bits and some mantissa bits."""

    name: str
    mantissa_bits: int
    min_exponent: int
    """Of the least normal number; below it spacing stays the same."""
    max_value: float
    dtype: torch.dtype | None = None
    """torch's type of these numbers, where it has one that can be cast to."""


E4M3 = FloatFormat("e4m3", 3, -6, 448.0, torch.float8_e4m3fn)
E5M2 = FloatFormat("e5m2", 2, -14, 57344.0, torch.float8_e5m2)
E2M1 = FloatFormat("e2m1", 1, 0, 6.0)
FORMATS: Mapping[str, FloatFormat] = MappingProxyType({f.name: f for f in (E4M3, E5M2, E2M1)})


def round_to_format(values: Tensor, number_format: FloatFormat) -> Tensor:
    """The nearest numbers of the format, in the dtype of `values`; NaN stays NaN.

    Args:
        values: any shape, float32 or float64.
    """
    clamped = values.clamp(-number_format.max_value, number_format.max_value)
    if number_format.dtype is not None:
        return clamped.to(number_format.dtype).to(values.dtype)
    _, exponent = torch.frexp(clamped)  # |x| in [2^(exponent - 1), 2^exponent)
    exponent = (exponent - 1).clamp_min(number_format.min_exponent)
    spacing = torch.ldexp(torch.ones_like(clamped), exponent - number_format.mantissa_bits)
    return torch.round(clamped / spacing) * spacing
