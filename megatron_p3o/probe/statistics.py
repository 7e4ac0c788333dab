"""What log-ratios say of a mismatch. Pure functions.

l = log p - log b of each response token, with p exact and b as served. Names and meanings are
those of docs/metrics.md. Standard errors take prompts as independent and nothing else: responses to
one prompt, and the tokens of one response, may depend on each other in any way. For a mean
m = sum_c s_c / n over C prompts,

    se = sqrt(C / (C - 1) * sum_c (s_c - m n_c)^2) / n

and for the ESS the jackknife over prompts. One prompt has none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_p3o.algorithms import KL_ESTIMATORS, EssSums, ratio_counts, ratio_quantile

# Shape legend: T response tokens, C prompts.

_BUCKET_GROWTH = 4


@dataclass(frozen=True, slots=True)
class Measured:
    """A number with its standard error, where it has one."""

    value: float
    standard_error: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionBucket:
    """Tokens at some positions of their responses."""

    first: int
    """From 0."""
    last: int
    num_tokens: int
    abs_mean: Measured
    """Of |l|, nats."""
    k3: Measured


def mismatch_metrics(log_ratios: Sequence[Tensor], prompts: Sequence[int]) -> dict[str, Measured]:
    """Metrics over all tokens.

    Args:
        log_ratios: of each response, `[tokens]`, nats; none is empty.
        prompts: which prompt each response answers.

    Raises:
        NonFiniteError: a ratio is not finite.
    """
    l_T, prompt_T = _flat(log_ratios, prompts)
    ess = _ess(l_T, prompt_T)  # first: it says which ratios cannot be used
    size_T, counts = l_T.abs(), ratio_counts(l_T)
    ordered_T = size_T.sort().values
    return {
        "tokens/response": Measured(len(l_T)),
        "mismatch/k3": mean_by_prompt(KL_ESTIMATORS["k3"](l_T), prompt_T),
        "mismatch/abs_logprob_mean": mean_by_prompt(size_T, prompt_T),
        **{
            f"mismatch/abs_logprob_p{percent}": Measured(_quantile(ordered_T, percent))
            for percent in (50, 90, 99)
        },
        "mismatch/abs_logprob_max": Measured(float(ordered_T[-1])),
        "ess/mismatch": ess,
        "ratio/mean": mean_by_prompt(l_T.exp(), prompt_T),
        "ratio/p01": Measured(ratio_quantile(counts, 0.01)),
        "ratio/p99": Measured(ratio_quantile(counts, 0.99)),
        "ratio/max": Measured(math.exp(float(l_T.max()))),
    }


def by_position(log_ratios: Sequence[Tensor], prompts: Sequence[int]) -> list[PositionBucket]:
    """The gap at positions 0, 1 to 3, 4 to 15, 16 to 63 and so on; buckets have tokens."""
    buckets, first, last = [], 0, 0
    longest = max(map(len, log_ratios))
    while first < longest:
        l_T, prompt_T = _flat([whole[first : last + 1] for whole in log_ratios], prompts)
        buckets.append(
            PositionBucket(
                first=first,
                last=last,
                num_tokens=len(l_T),
                abs_mean=mean_by_prompt(l_T.abs(), prompt_T),
                k3=mean_by_prompt(KL_ESTIMATORS["k3"](l_T), prompt_T),
            )
        )
        first = last + 1
        last = _BUCKET_GROWTH * first - 1
    return buckets


def mean_by_prompt(values: Tensor, prompts: Tensor) -> Measured:
    """Mean over all values, with its standard error by prompts.

    Args:
        values: `[T]` float64.
        prompts: `[T]` int64, which prompt each value belongs to.
    """
    mean = float(values.mean())
    _, index = prompts.unique(return_inverse=True)
    num_prompts = int(index.max()) + 1
    if num_prompts == 1:
        return Measured(mean)
    deviations_C = values.new_zeros(num_prompts).index_add_(0, index, values - mean)
    scale = num_prompts / (num_prompts - 1)
    return Measured(mean, math.sqrt(scale * float(deviations_C.square().sum())) / len(values))


def _flat(log_ratios: Sequence[Tensor], prompts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """All tokens (`[T]` float64), and the prompt of each (`[T]` int64)."""
    lengths = torch.tensor([len(part) for part in log_ratios])
    return torch.cat([*log_ratios]).double(), torch.tensor(prompts).repeat_interleave(lengths)


def _ess(l_T: Tensor, prompt_T: Tensor) -> Measured:
    _, index_T = prompt_T.unique(return_inverse=True)
    num_prompts = int(index_T.max()) + 1
    sums_C4 = EssSums.by_group(l_T, index_T, num_prompts)
    total = sums_C4.sum(dim=0)
    ess = EssSums.from_tensor(total).ess
    if num_prompts == 1:
        return Measured(ess)
    without = [EssSums.from_tensor(total - one).ess for one in sums_C4]
    mean = sum(without) / num_prompts
    spread = sum((value - mean) ** 2 for value in without)
    return Measured(ess, math.sqrt((num_prompts - 1) / num_prompts * spread))


def _quantile(ordered_T: Tensor, percent: int) -> float:
    """The least value that as many percent of the values do not exceed."""
    return float(ordered_T[math.ceil(percent * len(ordered_T) / 100) - 1])
