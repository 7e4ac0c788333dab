"""In which numbers rollout servers hold the weights.

The trainer's tensors are converted before they are sent, so that half the bytes travel for bf16 and
a quarter for FP8. Which tensors may be FP8, and which keep their dtype, are columns of the family
tables; blocks are cut from whole tensors. So a server gets the bytes that `p3o reshard` would have
written for it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_p3o.architecture import ModelArchitecture
from megatron_p3o.errors import NonFiniteError
from megatron_p3o.weights.families import ParamRow, param_rows
from megatron_p3o.weights.quantize import quantize_blockwise
from megatron_p3o.weights.resharding.hf_source import SCALE_SUFFIX

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedFormat:
    """What the servers were started with."""

    dtype: torch.dtype | None = None
    """Of every tensor that is not FP8; None: as the trainer holds it."""
    fp8: bool = False
    """Linear layers of the decoder in FP8 blocks with `_scale_inv` tensors beside them."""

    def row_dtype(self, row: ParamRow, held: torch.dtype) -> torch.dtype:
        """The dtype in which a row is served; float8_e4m3fn means FP8 blocks.

        Args:
            row: of the model's table.
            held: the trainer's dtype of it.
        """
        if self.fp8 and row.fp8:
            return FP8
        return held if row.keep_dtype or self.dtype is None else self.dtype


def served_tensors(
    named_tensors: Iterable[tuple[str, Tensor]],
    architecture: ModelArchitecture,
    served: ServedFormat,
) -> Iterator[tuple[str, Tensor]]:
    """The model as servers take it, in the order given, one tensor at a time.

    Args:
        named_tensors: by Hugging Face name, on any device.
        architecture: of the model.
        served: the numbers that are wanted.

    Yields:
        (name, tensor); an FP8 weight is followed by its scales. Tensors that need no conversion
        are handed on as they are, so they may be views of live parameters.

    Raises:
        NonFiniteError: a weight that becomes FP8 holds NaN or infinity.
        ValueError: the model's table has no such name.
    """
    rows = {name: row for row in param_rows(architecture) for name in row.hf}
    for name, tensor in named_tensors:
        if name not in rows:
            raise ValueError(f"tensor {name} has no row in the {architecture.family} table")
        dtype = served.row_dtype(rows[name], tensor.dtype)
        if dtype is not FP8:
            yield name, tensor.detach().to(dtype)
            continue
        try:
            quantized, scale_inv = quantize_blockwise(tensor.detach())
        except ValueError as error:
            raise NonFiniteError(
                f"{name} holds NaN or infinity and cannot be served in FP8; resume from a "
                "checkpoint whose weights are sound"
            ) from error
        yield name, quantized
        yield name + SCALE_SUFFIX, scale_inv
