"""The embedded engine in this process alone, with the weights of a checkpoint."""

import torch

from megatron_p3o.evaluation.inputs import EvalInputs
from megatron_p3o.rollout import EmbeddedEngine, ServedNumerics
from megatron_p3o.weights import param_rows


def embedded_engine(inputs: EvalInputs) -> EmbeddedEngine:
    """Serving as a run of the same precision does; reads the weights."""
    target, precision = inputs.target, inputs.precision
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = param_rows(target.architecture)
    engine = EmbeddedEngine(
        target.model_dir,
        sampling=inputs.sampling,
        seed=inputs.seed,
        batch_size=inputs.batch_size,
        dtype=_dtype(inputs, device.type),
        device=device,
        eos_token_ids=target.architecture.eos_token_ids,
        numerics=ServedNumerics.of(precision),
        fp8_weights=frozenset(name for row in rows if row.fp8 for name in row.hf),
    )
    engine.update_weights(target.weights(), version=0)
    return engine


def _dtype(inputs: EvalInputs, device_type: str) -> torch.dtype:
    precision = inputs.precision
    # FP8 is emulated in the trainer's type, which is fp32 where the trainer's FP8 is emulated too.
    served = precision.trainer if precision.rollout_is_fp8 else precision.rollout
    is_fp32 = served == "fp32" or (served.startswith("fp8-") and device_type == "cpu")
    return torch.float32 if is_fp32 else torch.bfloat16
