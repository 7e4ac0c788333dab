"""Loss normalisations as per-token weights, so that every one is exact under any split.

Losses are sums over tokens, divided once by n, the token count of the whole optimizer step. A
weight per token turns that into other means:

    token_mean      w = 1                     mean over tokens
    sequence_mean   w_i = n / (m * len_i)     mean over m sequences of each one's token mean

The weights need the lengths of all sequences of the step, so they are computed before the step is
shared among ranks and microbatches.
"""

from collections.abc import Sequence
from typing import Literal

Normalization = Literal["token_mean", "sequence_mean"]


def token_weights(lengths: Sequence[int], normalization: Normalization) -> list[float]:
    """One weight per sequence, to be given to each of its tokens; `sum(w_i * len_i) = n`.

    Args:
        lengths: response tokens of every sequence of the optimizer step. A sequence without
            tokens takes no part: its weight, which nothing multiplies, is 0 for `sequence_mean`.
        normalization: see the module.
    """
    if normalization == "token_mean":
        return [1.0] * len(lengths)
    num_tokens = sum(lengths)
    num_sequences = sum(length > 0 for length in lengths)
    return [num_tokens / (num_sequences * length) if length else 0.0 for length in lengths]
