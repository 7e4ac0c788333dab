"""The value of one table row on its way from a source to a sink."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_p3o.weights.families import ParamRow
from megatron_p3o.weights.quantize import dequantize_blockwise, quantize_blockwise


@dataclass(frozen=True, slots=True)
class BlockQuantized:
    """A weight in FP8 blocks, as `quantize_blockwise` gives it."""

    quantized: Tensor
    scale_inv: Tensor

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return dequantize_blockwise(self.quantized, self.scale_inv, dtype=dtype)

    @property
    def nbytes(self) -> int:
        return self.quantized.nbytes + self.scale_inv.nbytes


HfTensor = Tensor | BlockQuantized


class RowValue:
    """A row's tensors in the form the source has them; the other form is made when asked for."""

    def __init__(
        self,
        row: ParamRow,
        *,
        parts: Sequence[HfTensor] | None = None,
        merged: Tensor | None = None,
    ) -> None:
        """
        Args:
            row: what the value belongs to.
            parts: its Hugging Face tensors, in the row's order.
            merged: its global Megatron tensor, without padding; one of the two is given.
        """
        assert (parts is None) != (merged is None)
        self.row = row
        self._parts = parts
        self._merged = merged

    @property
    def nbytes(self) -> int:
        if self._parts is not None:
            return sum(part.nbytes for part in self._parts)
        assert self._merged is not None
        return self._merged.nbytes

    def parts(self) -> Sequence[HfTensor]:
        if self._parts is not None:
            return self._parts
        assert self._merged is not None
        return self.row.layout.split(self._merged)

    def merged(self) -> Tensor:
        """The global Megatron tensor; FP8 must have been converted before."""
        if self._merged is not None:
            return self._merged
        assert self._parts is not None
        tensors = [part for part in self._parts if isinstance(part, Tensor)]
        assert len(tensors) == len(self._parts), self.row.megatron
        return self.row.layout.merge(tensors)

    def converted(self, dtype: torch.dtype) -> "RowValue":
        """In `dtype`; float8_e4m3fn means FP8 blocks."""
        if dtype is torch.float8_e4m3fn:
            return RowValue(self.row, parts=[_quantized(part) for part in self.parts()])
        if self._merged is not None:
            return RowValue(self.row, merged=self._merged.to(dtype))
        assert self._parts is not None
        return RowValue(self.row, parts=[_plain(part, dtype) for part in self._parts])

    def num_nonfinite(self) -> int:
        """NaN and infinite entries; an FP8 weight counts a NaN code or a block's scale."""
        stored: Sequence[HfTensor] = self._parts if self._parts is not None else [self.merged()]
        return sum(
            count_nonfinite(tensor)
            for part in stored
            for tensor in (
                (part.quantized, part.scale_inv) if isinstance(part, BlockQuantized) else (part,)
            )
        )

    def equals(self, other: "RowValue") -> bool:
        """Bitwise, in shape and dtype too."""
        if self._merged is not None and other._merged is not None:
            return same_bits(self._merged, other._merged)
        pairs = zip(self.parts(), other.parts(), strict=True)
        return all(_same_part(mine, theirs) for mine, theirs in pairs)


def count_nonfinite(tensor: Tensor) -> int:
    """NaN and infinite entries of a tensor of any floating dtype."""
    if tensor.dtype is torch.float8_e4m3fn:
        # e4m3fn has no infinity, and its two NaN are the codes with all exponent and mantissa bits.
        return int((tensor.view(torch.uint8).bitwise_and(0x7F) == 0x7F).sum())
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return 0
    # One pass that allocates nothing; NaN wins over every number.
    least, greatest = torch.aminmax(tensor)
    if torch.isfinite(least) and torch.isfinite(greatest):
        return 0
    return tensor.numel() - int(torch.isfinite(tensor).sum())


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal in shape, dtype and every bit, so that NaN equals itself and 0 differs from -0."""
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    views = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*views)


def _same_part(one: HfTensor, other: HfTensor) -> bool:
    if isinstance(one, BlockQuantized) and isinstance(other, BlockQuantized):
        return same_bits(one.quantized, other.quantized) and same_bits(
            one.scale_inv, other.scale_inv
        )
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(one, other)
    return False


def _quantized(part: HfTensor) -> BlockQuantized:
    if isinstance(part, BlockQuantized):
        return part
    return BlockQuantized(*quantize_blockwise(part))


def _plain(part: HfTensor, dtype: torch.dtype) -> Tensor:
    return part.dequantized(dtype) if isinstance(part, BlockQuantized) else part.to(dtype)
