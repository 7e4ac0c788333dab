"""What the names of number types mean in bytes.

    trainer   fp32 | bf16 | fp8-...      rollout   fp32 | bf16 | fp8-block | fp8-tensor

Training in FP8 keeps weights in bf16 and, beside them, FP8 copies of every matrix of a linear
layer, by rows and by columns (Hopper's FP8 products want both operands' rows to run along the
summed dimension, so the backward pass needs the transpose), made once an optimizer step. With
`param_gather` the FP8 copies are the parameters, and those matrices have no bf16 form.

Scales: blockwise one fp32 for each 128 x 128 block, mxfp8 one byte for 32 numbers, else one for
each tensor, which is not counted.
"""

from dataclasses import dataclass

from megatron_p3o.config import PrecisionSection
from megatron_p3o.plan.parameters import Shape, StageParameters, Weight

_FP8_COPIES = 2
_BLOCK = 128
_SCALE_BYTES = {"fp8-blockwise": 4 / _BLOCK**2, "fp8-mxfp8": 1 / 32}


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    trainer: str
    rollout: str
    kv_cache: str = "auto"
    has_fp8_parameters: bool = False

    @classmethod
    def of(cls, section: PrecisionSection) -> "Precision":
        fp8 = getattr(section, "fp8", None)
        return cls(
            trainer=section.trainer,
            rollout=section.rollout,
            kv_cache=section.rollout_kv_cache,
            has_fp8_parameters=bool(getattr(fp8, "param_gather", False)),
        )

    @property
    def is_fp8_trainer(self) -> bool:
        return self.trainer.startswith("fp8")

    @property
    def trainer_bytes(self) -> int:
        """Of an activation, and of a weight that is not FP8."""
        return 4 if self.trainer == "fp32" else 2

    @property
    def linear_input_bytes(self) -> int:
        """Of what a linear layer keeps of its input."""
        return 1 if self.is_fp8_trainer else self.trainer_bytes

    @property
    def optimizer_bytes(self) -> int:
        """Of each parameter: both moments in fp32, and an fp32 copy where weights are not fp32."""
        return 8 if self.trainer == "fp32" else 12

    @property
    def rollout_bytes(self) -> int:
        """Of an activation of the rollout engine."""
        return 4 if self.rollout == "fp32" else 2

    @property
    def kv_bytes(self) -> int:
        """Of a number in the KV cache."""
        return 1 if self.kv_cache.startswith("fp8") else self.rollout_bytes

    def weight_bytes(self, parameters: StageParameters) -> int:
        """Of a rank's weights, FP8 copies included."""
        held = parameters.total * self.trainer_bytes
        if not self.is_fp8_trainer:
            return held
        of_fp8 = _FP8_COPIES * (1 + _SCALE_BYTES.get(self.trainer, 0.0))
        if self.has_fp8_parameters:
            of_fp8 -= self.trainer_bytes
        return held + round(parameters.fp8 * of_fp8)

    def served_bytes(self, weight: Weight) -> int:
        """Of a weight as it is sent to servers, and as `p3o reshard --dtype` writes it."""
        if weight.fp8 and self.rollout.startswith("fp8"):
            return weight.copies * sum(self._served_fp8(shape) for shape in weight.hf)
        if not weight.is_trained:
            return weight.num_elements * 4
        # With FP8 servers the other weights stay as the trainer holds them.
        is_fp8 = self.rollout.startswith("fp8")
        return weight.num_elements * (self.trainer_bytes if is_fp8 else self.rollout_bytes)

    def _served_fp8(self, shape: Shape) -> int:
        rows, columns = shape
        num_scales = -(-rows // _BLOCK) * -(-columns // _BLOCK)
        if self.rollout != "fp8-block":
            num_scales = 1
        return rows * columns + 4 * num_scales
