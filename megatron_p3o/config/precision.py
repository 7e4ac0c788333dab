"""In which numbers the trainer computes and the rollout engine serves."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt, model_validator

from megatron_p3o.config.section import Section

TrainerPrecision = Literal[
    "fp32", "bf16", "fp8-delayed", "fp8-tensorwise", "fp8-blockwise", "fp8-mxfp8"
]
_TENSOR_SCALED = ("fp8-delayed", "fp8-tensorwise")
# Tokens of which every rank's part of a sequence is a multiple, so that FP8 kernels take it
# (megatron/core/fp8_utils.py, get_fp8_align_size).
_ALIGNMENT = 16
_MXFP8_ALIGNMENT = 32


class Fp8Section(Section):
    """Details of an FP8 `precision.trainer`."""

    format: Literal["auto", "hybrid", "e4m3"] = "auto"
    """`hybrid`: gradients in e5m2, the rest in e4m3. `auto`: hybrid for the recipes that scale
    whole tensors, e4m3 for those that scale blocks, as Transformer Engine's recipes do."""
    margin: NonNegativeInt = 0
    """For fp8-delayed: scales are lowered by this power of two."""
    amax_history: PositiveInt = 1024
    """For fp8-delayed: entries of the history that a scale is taken from."""
    amax_from: Literal["max", "most_recent"] = "max"
    """For fp8-delayed: which entry gives the scale."""
    bf16_layers_at_start: NonNegativeInt = 0
    """First transformer layers that are kept out of FP8."""
    bf16_layers_at_end: NonNegativeInt = 0
    """Last transformer layers that are kept out of FP8."""
    param_gather: bool = False
    """Hold the weights in FP8 alone, beside the optimizer's fp32 ones, and gather them over
    data-parallel ranks in FP8 (CUDA; needs optimizer.distributed)."""


class PrecisionSection(Section):
    trainer: TrainerPrecision = "fp32"
    """Compute type of the trainer; master weights and gradients are fp32 in each. The FP8 recipes
    are Transformer Engine's: one scale per tensor, from a history of earlier steps (`fp8-delayed`)
    or from the tensor itself (`fp8-tensorwise`); scales per 1 x 128 of activations and gradients
    and per 128 x 128 of weights (`fp8-blockwise`); power-of-two scales per 32 numbers
    (`fp8-mxfp8`, Blackwell). Linear layers of the decoder compute in FP8, the rest in bf16. On a
    CPU they are emulated: rounded as the recipe rounds, multiplied in fp32."""
    fp8: Fp8Section = Fp8Section()
    rollout: Literal["fp32", "bf16", "fp8-block", "fp8-tensor"] = "fp32"
    """Type of the rollout engine's weights and activations. FP8 is for linear layers of the
    decoder: e4m3 with a scale per 128 x 128 block of a weight and per 1 x 128 of its inputs, or one
    per weight and one per token; the rest is bf16. The embedded engine emulates FP8: rounded
    numbers, multiplied in the trainer's type."""
    rollout_activations: Literal["quantized", "unquantized"] = "quantized"
    """With an FP8 rollout: whether the inputs of linear layers are FP8 too (engine embedded)."""
    rollout_format: Literal["e4m3", "e5m2", "e2m1"] = "e4m3"
    """Number format of an FP8 rollout. Anything but e4m3 is a coarser stand-in for studies (engine
    embedded): e5m2 doubles the rounding error; e2m1, a 4-bit format, quadruples it."""
    rollout_kv_cache: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """The rollout's KV cache; `auto`: as its activations."""

    @property
    def trainer_is_fp8(self) -> bool:
        return self.trainer.startswith("fp8-")

    @property
    def rollout_is_fp8(self) -> bool:
        return self.rollout.startswith("fp8-")

    @property
    def fp8_recipe(self) -> str:
        """Megatron's name of the recipe, for an FP8 trainer."""
        return self.trainer.removeprefix("fp8-")

    @property
    def fp8_format(self) -> Literal["hybrid", "e4m3"]:
        """What `fp8.format` means for the recipe."""
        if self.fp8.format != "auto":
            return self.fp8.format
        return "hybrid" if self.trainer in _TENSOR_SCALED else "e4m3"

    @property
    def token_alignment(self) -> int:
        """Tokens of which each rank's part of a sequence is a multiple."""
        if not self.trainer_is_fp8:
            return 1
        return _MXFP8_ALIGNMENT if self.trainer == "fp8-mxfp8" else _ALIGNMENT

    @model_validator(mode="after")
    def _trainer(self) -> "PrecisionSection":
        changed = {name for name in Fp8Section.model_fields if self._is_set(name)}
        if changed and not self.trainer_is_fp8:
            raise ValueError(
                f"precision.fp8.{min(changed)} goes with an FP8 precision.trainer (got "
                f"{self.trainer}); remove it or choose one such as fp8-blockwise"
            )
        delayed = changed & {"margin", "amax_history", "amax_from"}
        if delayed and self.trainer != "fp8-delayed":
            raise ValueError(
                f"precision.fp8.{min(delayed)} is of precision.trainer=fp8-delayed (got "
                f"{self.trainer}, whose scales have no history); remove it"
            )
        if self.fp8.param_gather and self.trainer == "fp8-mxfp8":
            raise ValueError(
                "precision.fp8.param_gather=true is not for precision.trainer=fp8-mxfp8, whose "
                "weights have one FP8 copy by rows and another by columns; remove it"
            )
        kept = changed & {"bf16_layers_at_start", "bf16_layers_at_end"}
        if kept and self.trainer == "fp8-delayed":
            raise ValueError(
                f"precision.fp8.{min(kept)} cannot be had with precision.trainer=fp8-delayed, "
                "whose scales Megatron exchanges over all layers; remove it or choose "
                "fp8-tensorwise"
            )
        return self

    @model_validator(mode="after")
    def _rollout(self) -> "PrecisionSection":
        for field, default in (("rollout_activations", "quantized"), ("rollout_format", "e4m3")):
            value = getattr(self, field)
            if value != default and not self.rollout_is_fp8:
                raise ValueError(
                    f"precision.{field}={value} goes with an FP8 precision.rollout (got "
                    f"{self.rollout}); remove it or set precision.rollout=fp8-block"
                )
        return self

    def _is_set(self, name: str) -> bool:
        return getattr(self.fp8, name) != Fp8Section.model_fields[name].default
