"""FP8 weights in square blocks, as the published FP8 models of DeepSeek and Qwen store them.

A weight [out, in] is cut into blocks of 128 x 128 (smaller at the right and lower edge). Each block
has one float32 scale, and the weight is stored as float8 e4m3:

    scale_inv = max |w| of the block / 448          [ceil(out / 128), ceil(in / 128)], float32
    q         = round_to_e4m3(w / scale_inv)        [out, in]
    w'        = q * scale_inv

Error bound. e4m3 has 3 mantissa bits and the least exponent -6, so rounding to nearest moves a
normal number by at most 2^-4 of itself and a subnormal one by at most 2^-10:

    |w' - w| <= max(|w| / 16, scale_inv / 1024)

up to float32 rounding. With the block's maximum m, the second term is m / 458752.

Blocks are those of the whole tensor, never of a rank's shard: a scale then means the same in every
layout.
"""

import torch
from torch import Tensor

from megatron_p3o.numerics import num_blocks, to_blocks

BLOCK = (128, 128)
E4M3_MAX = 448.0

# Rows of blocks handled at once; bounds the float32 copy of a large weight.
_BAND_BLOCKS = 8


def quantize_blockwise(weight: Tensor, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    """A weight in e4m3 with one scale per block.

    Args:
        weight: [out, in], a floating dtype, on any device.
        block: rows and columns of a block.

    Returns:
        (q, scale_inv): [out, in] float8_e4m3fn and [ceil(out / rows), ceil(in / columns)] float32,
        on the weight's device. A block of zeros has scale 1.

    Raises:
        ValueError: the weight is not a matrix, or holds NaN or infinity.
    """
    _check_matrix(weight)
    device = weight.device
    scales = torch.empty(num_blocks(tuple(weight.shape), block), dtype=torch.float32, device=device)
    quantized = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=device)
    band_rows = block[0] * _BAND_BLOCKS
    for start in range(0, len(weight), band_rows):
        rows = weight[start : start + band_rows].float()
        blocks = to_blocks(rows, block)
        largest = blocks.abs().amax(dim=(1, 3))
        if not torch.isfinite(largest).all():
            raise ValueError("a weight with NaN or infinity cannot be quantised; repair it first")
        scale = torch.where(largest > 0, largest / E4M3_MAX, torch.ones_like(largest))
        # The least float32 numbers divided by 448 lose bits or vanish.
        scale = scale.clamp_min(torch.finfo(torch.float32).tiny)
        scaled = (blocks / scale[:, None, :, None]).flatten(2, 3).flatten(0, 1)
        quantized[start : start + band_rows] = scaled[: len(rows), : rows.shape[1]].to(
            torch.float8_e4m3fn
        )
        first = start // block[0]
        scales[first : first + len(scale)] = scale
    return quantized, scales


def dequantize_blockwise(
    quantized: Tensor,
    scale_inv: Tensor,
    block: tuple[int, int] = BLOCK,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Inverse of `quantize_blockwise` up to its error bound.

    Args:
        quantized: [out, in], float8_e4m3fn.
        scale_inv: [ceil(out / rows), ceil(in / columns)].
        block: rows and columns of a block.
        dtype: of the result; products are rounded to it once, from float32.

    Raises:
        ValueError: `quantized` is not a matrix, or the scales have another shape.
    """
    _check_matrix(quantized)
    expected = num_blocks(tuple(quantized.shape), block)
    if tuple(scale_inv.shape) != expected:
        raise ValueError(
            f"scale_inv has shape {list(scale_inv.shape)}, a weight of shape "
            f"{list(quantized.shape)} in blocks of {block[0]} x {block[1]} needs {list(expected)}"
        )
    weight = torch.empty(quantized.shape, dtype=dtype, device=quantized.device)
    band_rows = block[0] * _BAND_BLOCKS
    for start in range(0, len(quantized), band_rows):
        rows = quantized[start : start + band_rows].float()
        first = start // block[0]
        scale = scale_inv[first : first + _BAND_BLOCKS].float()
        blocks = to_blocks(rows, block) * scale[:, None, :, None]
        weight[start : start + band_rows] = blocks.flatten(2, 3).flatten(0, 1)[
            : len(rows), : rows.shape[1]
        ]
    return weight


def _check_matrix(weight: Tensor) -> None:
    if weight.dim() != 2:
        raise ValueError(
            f"a weight of shape {list(weight.shape)} cannot be cut into blocks; it must be a matrix"
        )
