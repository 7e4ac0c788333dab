"""Quantiles of policy ratios from a fixed histogram: the same for every split of a step.

Quantiles do not merge, but counts do. Log-ratios are counted in bins of one fixed grid,

    bin k holds  l with  (k - 1/2) * w <= l < (k + 1/2) * w      w = 0.01, |k| <= 1024

so the counts of shards and microbatches add up, and a quantile read from them is the ratio e^(k w)
at the centre of its bin: within a factor e^(w/2) (0.5 %) of the exact one. Bin 0 is centred at
ratio 1, so that on-policy data gives exactly 1. The outermost bins also hold everything beyond
ratios of e^-10.24 and e^10.24 (28000).
"""

import math

import torch
from torch import Tensor

BIN_WIDTH = 0.01  # nats
NUM_SIDE_BINS = 1024
NUM_BINS = 2 * NUM_SIDE_BINS + 1


def ratio_counts(log_ratios: Tensor) -> Tensor:
    """Tokens in each bin.

    Args:
        log_ratios: `[T]`, any float dtype; gradient is not followed, NaN counts in no bin.

    Returns:
        `[NUM_BINS]` float64 counts, additive over shards.
    """
    log_ratios = log_ratios.detach().double()
    log_ratios = log_ratios[~log_ratios.isnan()]
    edge = float(NUM_SIDE_BINS)
    bins = (log_ratios / BIN_WIDTH + 0.5).floor().clamp(-edge, edge).long() + NUM_SIDE_BINS
    return torch.bincount(bins, minlength=NUM_BINS).double()


def ratio_quantile(counts: Tensor, quantile: float) -> float:
    """The ratio at the centre of the first bin up to which `quantile` of the tokens lie.

    Args:
        counts: `[NUM_BINS]` of `ratio_counts`, merged over all shards; not all 0.
        quantile: in (0, 1].
    """
    cumulative = counts.cumsum(0)
    total = float(cumulative[-1])
    assert total > 0 and 0 < quantile <= 1, (total, quantile)
    # Counts are whole numbers; the product must not be rounded up past one of them.
    index = int(torch.searchsorted(cumulative, quantile * total * (1 - 1e-12)))
    return math.exp((index - NUM_SIDE_BINS) * BIN_WIDTH)
