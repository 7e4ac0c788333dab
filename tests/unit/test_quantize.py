"""FP8 blocks: hand-computed values, the stated error bound, edges that do not divide."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_p3o.weights.quantize import (
    dequantize_blockwise,
    num_blocks,
    quantize_blockwise,
)


def bound(weight: Tensor, scale_inv: Tensor, block: tuple[int, int]) -> Tensor:
    """The bound of the module's docstring, entry by entry, from every entry's own block."""
    rows, columns = (torch.arange(size) // b for size, b in zip(weight.shape, block, strict=True))
    scales = scale_inv[rows][:, columns]
    return torch.maximum(weight.abs() / 16, scales / 1024) * (1 + 1e-6)


def test_values_written_by_hand() -> None:
    """Two blocks of 1 x 2. Scales 448/448 and 896/448; 17 lies between 16 and 18 and is a tie."""
    weight = torch.tensor([[448.0, 17.0, 896.0, -6.0]])
    quantized, scale_inv = quantize_blockwise(weight, (1, 2))
    assert scale_inv.tolist() == [[1.0, 2.0]]
    assert quantized.float().tolist() == [[448.0, 16.0, 448.0, -3.0]]
    assert dequantize_blockwise(quantized, scale_inv, (1, 2)).tolist() == [
        [448.0, 16.0, 896.0, -6.0]
    ]


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    block=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 1000),
)
def test_the_error_is_within_the_bound(
    rows: int, columns: int, block: tuple[int, int], exponent: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randint(-12, 3, (rows, columns), generator=generator)
    weight = torch.randn(rows, columns, generator=generator) * 2.0 ** (exponent + spread)
    quantized, scale_inv = quantize_blockwise(weight, block)
    assert quantized.dtype is torch.float8_e4m3fn
    assert tuple(scale_inv.shape) == num_blocks((rows, columns), block)
    error = (dequantize_blockwise(quantized, scale_inv, block).double() - weight).abs()
    assert (error <= bound(weight.double(), scale_inv.double(), block)).all()


def test_the_bound_is_tight() -> None:
    """A bound that is much too wide would let a worse rounding pass."""
    weight = torch.randn(256, 256)
    quantized, scale_inv = quantize_blockwise(weight)
    error = (dequantize_blockwise(quantized, scale_inv) - weight).abs()
    assert (error / bound(weight, scale_inv, (128, 128))).max() > 0.9
    assert 0.02 < error.norm() / weight.norm() < 0.03


def test_blocks_of_a_large_weight_are_those_of_small_ones() -> None:
    """Bands of rows are an implementation detail: each block is quantised alone."""
    weight = torch.randn(3000, 300).bfloat16()
    quantized, scale_inv = quantize_blockwise(weight)
    assert scale_inv.shape == (24, 3)
    last, last_scale = quantize_blockwise(weight[2944:, 256:].contiguous())
    assert torch.equal(quantized[2944:, 256:].view(torch.uint8), last.view(torch.uint8))
    assert torch.equal(scale_inv[23:, 2:], last_scale)


def test_quantising_again_changes_nothing() -> None:
    quantized, scale_inv = quantize_blockwise(torch.randn(200, 150))
    restored = dequantize_blockwise(quantized, scale_inv)
    again, scale_again = quantize_blockwise(restored)
    assert torch.equal(quantized.view(torch.uint8), again.view(torch.uint8))
    assert torch.allclose(scale_inv, scale_again, rtol=1e-6)


def test_zeros_and_tiny_numbers() -> None:
    quantized, scale_inv = quantize_blockwise(torch.zeros(2, 2))
    assert scale_inv.tolist() == [[1.0]]
    assert quantized.float().tolist() == [[0.0, 0.0], [0.0, 0.0]]
    tiny = torch.full((2, 2), 1e-44)
    assert torch.isfinite(dequantize_blockwise(*quantize_blockwise(tiny))).all()


def test_the_result_dtype_is_rounded_once() -> None:
    quantized, scale_inv = quantize_blockwise(torch.randn(130, 130))
    exact = dequantize_blockwise(quantized, scale_inv)
    assert torch.equal(
        dequantize_blockwise(quantized, scale_inv, dtype=torch.bfloat16), exact.bfloat16()
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(value: float) -> None:
    weight = torch.zeros(4, 4)
    weight[3, 1] = value
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize_blockwise(weight)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="must be a matrix"):
        quantize_blockwise(torch.zeros(4))
    quantized, _ = quantize_blockwise(torch.zeros(130, 4))
    with pytest.raises(ValueError, match=r"needs \[2, 1\]"):
        dequantize_blockwise(quantized, torch.ones(1, 1))
