"""The mathematics of training: ESS, KL estimators, advantages and losses.

Pure functions of tensors and numbers: no collectives, no Megatron, no files. Losses take the
trust statistics of the batch as an argument and return sums over tokens, so their values and
gradients do not depend on how a step is split.
"""

from megatron_p3o.algorithms.advantages import group_advantages
from megatron_p3o.algorithms.baselines import grpo_loss, reinforce_loss
from megatron_p3o.algorithms.ess import EssSums, first_nonfinite
from megatron_p3o.algorithms.kl import KL_ESTIMATORS
from megatron_p3o.algorithms.normalization import token_weights
from megatron_p3o.algorithms.p3o import p3o_loss
from megatron_p3o.algorithms.registry import LOSSES, LossFunction
from megatron_p3o.algorithms.trust import TrustStats

__all__ = [
    "KL_ESTIMATORS",
    "LOSSES",
    "EssSums",
    "LossFunction",
    "TrustStats",
    "first_nonfinite",
    "group_advantages",
    "grpo_loss",
    "p3o_loss",
    "reinforce_loss",
    "token_weights",
]
