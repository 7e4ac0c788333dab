"""Losses by the name that `objective.name` gives."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from megatron_p3o.algorithms.baselines import grpo_loss, reinforce_loss
from megatron_p3o.algorithms.p3o import p3o_loss
from megatron_p3o.algorithms.trust import TrustStats
from megatron_p3o.types import LossOutput, TokenStats


class LossFunction(Protocol):
    """Pure function of one microbatch. No collectives; sums, never means."""

    def __call__(self, stats: TokenStats, trust: TrustStats, config: Any) -> LossOutput:
        """`config` is the objective section of the function's own name."""
        ...


LOSSES: Mapping[str, LossFunction] = MappingProxyType(
    {"p3o": p3o_loss, "reinforce": reinforce_loss, "grpo": grpo_loss}
)
