"""Losses by the name that `objective.name` gives, and what each needs to be told."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, Protocol

from megatron_p3o.algorithms.baselines import grpo_loss, reinforce_loss
from megatron_p3o.algorithms.cispo import cispo_loss
from megatron_p3o.algorithms.gspo import gspo_loss
from megatron_p3o.algorithms.p3o import p3o_loss
from megatron_p3o.algorithms.p4o import p4o_loss
from megatron_p3o.algorithms.ppo_decoupled import ppo_decoupled_loss
from megatron_p3o.algorithms.reference import add_reference_kl
from megatron_p3o.algorithms.sapo import sapo_loss
from megatron_p3o.algorithms.sft import sft_loss
from megatron_p3o.algorithms.trust import TrustStats
from megatron_p3o.config import ObjectiveBase, ReferenceSection
from megatron_p3o.types import LossOutput, TokenStats


class LossFunction(Protocol):
    """Pure function of one microbatch. No collectives; sums, never means."""

    def __call__(self, stats: TokenStats, trust: TrustStats, config: Any) -> LossOutput:
        """`config` is the objective section of the function's own name."""
        ...


LOSSES: Mapping[str, LossFunction] = MappingProxyType(
    {
        "p3o": p3o_loss,
        "p4o": p4o_loss,
        "reinforce": reinforce_loss,
        "rloo": reinforce_loss,
        "grpo": grpo_loss,
        "dapo": grpo_loss,
        "dr_grpo": grpo_loss,
        "gspo": gspo_loss,
        "cispo": cispo_loss,
        "sapo": sapo_loss,
        "ppo_decoupled": ppo_decoupled_loss,
        "sft": sft_loss,
    }
)

LossInput = Literal["proximal", "sequences", "entropy", "reference"]
"""An optional field of `TokenStats`: `proximal_logprobs`, `sequences`, `entropy`,
`reference_logprobs`."""

_OWN_INPUTS: Mapping[str, frozenset[LossInput]] = MappingProxyType(
    {
        "p4o": frozenset({"proximal"}),
        "gspo": frozenset({"sequences"}),
        "ppo_decoupled": frozenset({"proximal"}),
    }
)


def total_loss(
    stats: TokenStats, trust: TrustStats, objective: ObjectiveBase, reference: ReferenceSection
) -> LossOutput:
    """What a step minimises: the named objective, plus the KL to the reference model."""
    return add_reference_kl(LOSSES[objective.name](stats, trust, objective), stats, reference)


def required_inputs(config: ObjectiveBase, reference: ReferenceSection) -> frozenset[LossInput]:
    """The optional fields of `TokenStats` that `total_loss` of this configuration reads.

    Every way of scoring can give all of them: the score pass of `train.scoring: separate`, and the
    forward passes of `fused`, which all end before the first loss is taken.
    """
    inputs = set(_OWN_INPUTS.get(config.name, ()))
    if config.correction.mode != "off":
        inputs.add("proximal")
        if config.correction.level != "token":
            inputs.add("sequences")
    if config.entropy_coefficient:
        inputs.add("entropy")
    if reference.kl_coefficient:
        inputs.add("reference")
    return frozenset(inputs)
