"""Scales for small formats, and tensors rounded to them: quantised and brought back at once.

A group of numbers shares one scale that maps its largest magnitude onto the format's largest:

    scale = max |x| / max_value        x' = round(x / scale) * scale

`Scaling` says which numbers form a group. With `power_of_two` the scale is rounded up to a power of
two, as Transformer Engine's block recipes and the microscaling formats have it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_p3o.numerics.blocks import to_blocks
from megatron_p3o.numerics.formats import FloatFormat, round_to_format


@dataclass(frozen=True, slots=True)
class Scaling:
    """Which numbers of a matrix share a scale."""

    block: tuple[int, int] | None = None
    """Rows and columns of a block; None: the whole matrix. A row count of 1 and a column count of
    128 is one scale per 128 neighbours of a row."""
    power_of_two: bool = False


PER_TENSOR = Scaling()


def scale_of(largest: Tensor, number_format: FloatFormat, *, power_of_two: bool = False) -> Tensor:
    """Scales from largest magnitudes, elementwise; 1 where all numbers are 0."""
    scale = torch.where(largest > 0, largest / number_format.max_value, torch.ones_like(largest))
    # The least float32 numbers divided by the largest of a format lose bits or vanish.
    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2^exponent, mantissa < 1
        # Only an exact power of two has mantissa 1/2; everything else is rounded up.
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scale = torch.ldexp(torch.ones_like(scale), exponent)
    return scale


def fake_quantize(
    matrix: Tensor,
    number_format: FloatFormat,
    scaling: Scaling = PER_TENSOR,
    *,
    scale: Tensor | None = None,
) -> Tensor:
    """The matrix as it comes back from the format.

    Args:
        matrix: [rows, columns], a floating dtype; computed in float32.
        number_format: of the rounded numbers.
        scaling: the groups. Blocks begin at the first row and column.
        scale: [] of the whole matrix, in place of the one that follows from it; numbers beyond its
            reach saturate. Only without blocks.

    Returns:
        The same shape and dtype.
    """
    values = matrix.float()
    if scaling.block is None:
        if scale is None:
            largest = values.abs().amax() if values.numel() else values.new_zeros(())
            scale = scale_of(largest, number_format, power_of_two=scaling.power_of_two)
        return (round_to_format(values / scale, number_format) * scale).to(matrix.dtype)
    assert scale is None, "blocks have scales of their own"
    if not values.numel():
        return matrix.clone()
    blocks = to_blocks(values, scaling.block)
    scales = scale_of(
        blocks.abs().amax(dim=(1, 3), keepdim=True),
        number_format,
        power_of_two=scaling.power_of_two,
    )
    rounded = (round_to_format(blocks / scales, number_format) * scales).flatten(2, 3).flatten(0, 1)
    return rounded[: matrix.shape[0], : matrix.shape[1]].to(matrix.dtype)
