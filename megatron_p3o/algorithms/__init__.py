"""The mathematics of training: ESS, KL estimators, advantages and losses.

Pure functions of tensors and numbers: no collectives, no Megatron, no files. Losses take the
trust statistics of the batch as an argument and return sums over tokens, so their values and
gradients do not depend on how a step is split.
"""

from megatron_p3o.algorithms.advantages import group_advantages, overlong_penalty
from megatron_p3o.algorithms.baselines import grpo_loss, reinforce_loss
from megatron_p3o.algorithms.cispo import cispo_loss
from megatron_p3o.algorithms.ess import EssSums, first_nonfinite
from megatron_p3o.algorithms.gspo import gspo_loss
from megatron_p3o.algorithms.histogram import NUM_BINS, ratio_counts, ratio_quantile
from megatron_p3o.algorithms.kl import KL_ESTIMATORS
from megatron_p3o.algorithms.normalization import token_weights
from megatron_p3o.algorithms.p3o import p3o_loss
from megatron_p3o.algorithms.p4o import p4o_loss
from megatron_p3o.algorithms.ppo_decoupled import ppo_decoupled_loss
from megatron_p3o.algorithms.reference import add_reference_kl
from megatron_p3o.algorithms.registry import (
    LOSSES,
    LossFunction,
    LossInput,
    required_inputs,
    total_loss,
)
from megatron_p3o.algorithms.sapo import sapo_loss
from megatron_p3o.algorithms.sequences import sequence_stats, sequence_sums
from megatron_p3o.algorithms.sft import sft_loss
from megatron_p3o.algorithms.trust import TrustStats

__all__ = [
    "KL_ESTIMATORS",
    "LOSSES",
    "NUM_BINS",
    "EssSums",
    "LossFunction",
    "LossInput",
    "TrustStats",
    "add_reference_kl",
    "cispo_loss",
    "first_nonfinite",
    "group_advantages",
    "grpo_loss",
    "gspo_loss",
    "overlong_penalty",
    "p3o_loss",
    "p4o_loss",
    "ppo_decoupled_loss",
    "ratio_counts",
    "ratio_quantile",
    "reinforce_loss",
    "required_inputs",
    "sapo_loss",
    "sequence_stats",
    "sequence_sums",
    "sft_loss",
    "token_weights",
    "total_loss",
]
