"""Transformer Engine's FP8 recipes on the CPU: rounded as they round, multiplied in fp32.

A linear layer has three products, and each takes both of its factors in FP8:

    y  = x w^T      x [T, in] and w [out, in], sums over in
    dx = g w        g [T, out] and w,          sums over out
    dw = g^T x      g and x,                   sums over T

The recipes differ in which numbers share a scale (transformer_engine/common/recipe):

    delayed     whole tensor; the scale from a history of largest magnitudes
    tensorwise  whole tensor; the scale from the tensor itself
    blockwise   1 x 128 of x and g along the sum, 128 x 128 of w; powers of two
    mxfp8       1 x 32 along the sum for all; powers of two

Where groups lie along the sum, a tensor that enters two products is rounded twice, each time from
its exact numbers. Weights and activations are e4m3; gradients e5m2 with the format `hybrid`.

What is shared with other ranks. A tensor-parallel rank rounds its own shard of a weight and of a
row-parallel layer's input, as Transformer Engine does. Blocks of a shard are those of the whole
tensor when the shard begins at a multiple of the block, and then results do not depend on the
layout; a scale of a whole tensor does depend on it. Under sequence parallelism the input is
gathered first, so its scale is that of all positions. Groups along T are of the tokens of one
microbatch on one rank, so dw also depends on how a step is cut into microbatches and context
shards: little with scales that are powers of two, which change how a number is rounded only where
it is subnormal. The history of `delayed` is of all ranks that share a layer; experts of the same
place on their ranks share one, as on CUDA.

What is not as on CUDA. Products are summed in fp32. The history of `delayed` advances once per
optimizer step, not per microbatch, so that scoring and training round alike; a tensor that has none
yet uses its own magnitude. Norms and attention compute in fp32 instead of bf16.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_p3o.config import PrecisionSection
from megatron_p3o.numerics import E4M3, E5M2, FloatFormat, Scaling, fake_quantize
from megatron_p3o.numerics.scaling import scale_of

# Rows of a history: the layer's input, its weight, the gradient of its output.
_INPUT, _WEIGHT, _GRADIENT = range(3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How the three tensors of a linear layer are rounded."""

    gradients: FloatFormat
    vectors: Scaling
    """Of x and g, whose rows lie along the sum."""
    weights: Scaling
    history: int = 0
    """Optimizer steps of the history of `delayed`; 0 for the other recipes."""
    from_most_recent: bool = False
    margin: int = 0

    @classmethod
    def of(cls, precision: PrecisionSection) -> "Recipe":
        gradients = E5M2 if precision.fp8_format == "hybrid" else E4M3
        recipe, details = precision.fp8_recipe, precision.fp8
        if recipe == "blockwise":
            return cls(
                gradients=gradients,
                vectors=Scaling((1, 128), power_of_two=True),
                weights=Scaling((128, 128), power_of_two=True),
            )
        if recipe == "mxfp8":
            along_sum = Scaling((1, 32), power_of_two=True)
            return cls(gradients=gradients, vectors=along_sum, weights=along_sum)
        return cls(
            gradients=gradients,
            vectors=Scaling(),
            weights=Scaling(),
            history=details.amax_history if recipe == "delayed" else 0,
            from_most_recent=details.amax_from == "most_recent",
            margin=details.margin,
        )

    def rounded(
        self, matrix: Tensor, which: int, history: "AmaxHistory | None", *, transposed: bool = False
    ) -> Tensor:
        """The matrix as a product takes it that sums over its columns; `transposed`: its rows."""
        number_format = self.gradients if which == _GRADIENT else E4M3
        scaling = self.weights if which == _WEIGHT else self.vectors
        scale = None if history is None else history.scale(which, matrix, number_format, self)
        if transposed and scaling.block is not None:
            return fake_quantize(matrix.t(), number_format, scaling).t()
        return fake_quantize(matrix, number_format, scaling, scale=scale)


class AmaxHistory:
    """Largest magnitudes of one layer's three tensors over the last optimizer steps."""

    def __init__(self, length: int) -> None:
        self.past = torch.zeros(3, length)
        """Newest first; 0 where there is none."""
        self.present = torch.zeros(3)
        """Of the optimizer step that is being computed."""

    def scale(
        self, which: int, matrix: Tensor, number_format: FloatFormat, recipe: Recipe
    ) -> Tensor:
        """[] scale from the past; from the matrix itself while there is no past."""
        largest = matrix.detach().abs().amax().float() if matrix.numel() else torch.zeros(())
        self.present[which] = torch.maximum(self.present[which], largest)
        past = self.past[which, :1] if recipe.from_most_recent else self.past[which]
        known = past.amax()
        return scale_of(torch.where(known > 0, known, largest), number_format) * 2**recipe.margin

    def advance(self, present: Tensor) -> None:
        """Make [3] magnitudes of the finished step the newest of the past."""
        self.past = torch.cat([present[:, None], self.past[:, :-1]], dim=1)
        self.present.zero_()


class _Fp8Product(torch.autograd.Function):
    """y = x w^T with all three products in emulated FP8."""

    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, w_OI: Tensor, recipe: Recipe, history: AmaxHistory | None
    ) -> Tensor:
        ctx.save_for_backward(x_TI, w_OI)
        ctx.recipe, ctx.history = recipe, history
        x = recipe.rounded(x_TI, _INPUT, history)
        return x @ recipe.rounded(w_OI, _WEIGHT, history).t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, w_OI = ctx.saved_tensors
        recipe, history, g_TO = ctx.recipe, ctx.history, gradients[0]
        dx_TI = dw_OI = None
        if ctx.needs_input_grad[0]:
            w = recipe.rounded(w_OI, _WEIGHT, history, transposed=True)
            dx_TI = recipe.rounded(g_TO, _GRADIENT, history) @ w
        if ctx.needs_input_grad[1]:
            g = recipe.rounded(g_TO, _GRADIENT, history, transposed=True)
            dw_OI = g.t() @ recipe.rounded(x_TI, _INPUT, history, transposed=True)
        return dx_TI, dw_OI, None, None


class _EmulatedLinear:
    """Stands in for `_forward_impl` of Megatron's local linear layers."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.history = AmaxHistory(recipe.history) if recipe.history else None

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup | None,
        **unused: Any,
    ) -> Tensor:
        """[..., in] and [out, in] to [..., out]; the collectives are those of the original."""
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(
                input, tensor_parallel_output_grad=True, group=tp_group
            )
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        flat = input.reshape(-1, input.shape[-1])
        output = _Fp8Product.apply(flat, weight, self._recipe, self.history)
        output = output.view(*input.shape[:-1], weight.shape[0])
        return output if bias is None else output + bias


class Fp8Emulation:
    """The emulated layers of this rank's part of the model."""

    def __init__(
        self, layers: Mapping[int, torch.nn.Module], num_layers: int, precision: PrecisionSection
    ) -> None:
        """Make the linear layers compute in emulated FP8.

        Args:
            layers: transformer layers by their number in the whole model, from 0.
            num_layers: of the whole model.
            precision: of an FP8 trainer.
        """
        recipe, details = Recipe.of(precision), precision.fp8
        self._linears: list[_EmulatedLinear] = []
        end = num_layers - details.bf16_layers_at_end
        for index, layer in layers.items():
            if details.bf16_layers_at_start <= index < end:
                self._linears += _emulate(layer, recipe)

    def __len__(self) -> int:
        """Linear layers that are emulated."""
        return len(self._linears)

    def advance(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """An optimizer step is over: histories gain its magnitudes. Collective over the groups,
        which together join the ranks of a pipeline stage."""
        histories = list(self._histories())
        if not histories:
            return
        present = torch.stack([history.present for history in histories])
        for group in groups:
            dist.all_reduce(present, op=dist.ReduceOp.MAX, group=group)
        for history, largest in zip(histories, present, strict=True):
            history.advance(largest)

    def _histories(self) -> Iterator[AmaxHistory]:
        return (linear.history for linear in self._linears if linear.history is not None)


def _emulate(layer: torch.nn.Module, recipe: Recipe) -> list[_EmulatedLinear]:
    emulated = []
    for module in layer.modules():
        if not isinstance(module, ColumnParallelLinear | RowParallelLinear):
            continue
        linear = _EmulatedLinear(recipe)
        module._forward_impl = linear  # type: ignore[assignment]
        if linear.history is not None:
            _save_with(module, linear.history)
        emulated.append(linear)
    return emulated


def _save_with(module: torch.nn.Module, history: AmaxHistory) -> None:
    """Checkpoints hold the history where Transformer Engine has its own, in the extra state."""

    def get_extra_state() -> Tensor:
        return history.past

    def set_extra_state(state: Tensor | None) -> None:
        # None: the checkpoint is of a run without histories.
        if isinstance(state, Tensor) and state.shape == history.past.shape:
            history.past = state.clone()

    module.get_extra_state = get_extra_state  # type: ignore[method-assign]
    module.set_extra_state = set_extra_state  # type: ignore[method-assign]
