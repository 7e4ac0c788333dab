"""Names of serving precisions: `base[:weights][@format][+kv-format]`. Imports no torch.

fp8-block                as precision.rollout=fp8-block
fp8-block:weights        with rollout_activations=unquantized
fp8-block@e5m2           with rollout_format=e5m2
fp8-block+kv-e4m3        with rollout_kv_cache=fp8_e4m3
"""

import re
from dataclasses import dataclass

from megatron_p3o.config import PrecisionSection
from megatron_p3o.errors import ConfigurationError

DEFAULT_PRECISIONS = (
    "fp32",
    "bf16",
    "fp8-block",
    "fp8-block:weights",
    "fp8-tensor",
    "fp8-block+kv-e4m3",
    "fp8-block@e5m2",
    "fp8-block@e2m1",
)
_NAME = re.compile(
    r"(?P<base>fp32|bf16|fp8-block|fp8-tensor)"
    r"(?P<weights>:weights)?(?:@(?P<format>e4m3|e5m2|e2m1))?(?:\+kv-(?P<kv>e4m3|e5m2))?"
)


@dataclass(frozen=True, slots=True)
class ServingPrecision:
    """A way of serving, by its name on the command line."""

    name: str
    section: PrecisionSection


def parse_precision(name: str, option: str = "--precision") -> ServingPrecision:
    """What a name stands for.

    Args:
        name: see the module.
        option: that it was given with, for messages.

    Raises:
        ConfigurationError: there is no such precision.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ConfigurationError(
            f"{option}={name} must be fp32, bf16, fp8-block or fp8-tensor, then any of :weights, "
            "@e4m3, @e5m2 or @e2m1, and +kv-e4m3 or +kv-e5m2, in this order; use for example "
            "fp8-block:weights@e5m2+kv-e4m3"
        )
    base, weights, number_format, kv = match.group("base", "weights", "format", "kv")
    if not base.startswith("fp8-") and (weights or number_format):
        raise ConfigurationError(
            f"{option}={name}: {weights or '@' + number_format} goes with fp8-block or fp8-tensor; "
            "remove it or choose one of them"
        )
    fields = {
        "rollout": base,
        "rollout_activations": "unquantized" if weights else "quantized",
        "rollout_format": number_format or "e4m3",
        "rollout_kv_cache": f"fp8_{kv}" if kv else "auto",
    }
    return ServingPrecision(name, PrecisionSection.model_validate(fields))
