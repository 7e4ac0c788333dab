"""Loss normalisations as per-token weights, so that every one is exact under any split.

Losses are sums over tokens, divided once by n, the token count of the whole optimizer step. A
weight per token turns that into other means over the m sequences of the step:

    token_mean        w = 1                     mean over tokens (DAPO, arXiv:2503.14476)
    sequence_mean     w_i = n / (m * len_i)     mean over sequences of each one's token mean
    constant_length   w = n / (m * L)           sum over tokens / (m * L) (Dr. GRPO, 2503.20783)

constant_length removes the dependence on the response's own length that sequence_mean has; L is a
constant of the run, so it only scales the loss. The weights need the lengths of all sequences of
the step, so they are computed before the step is shared among ranks and microbatches.
"""

from collections.abc import Sequence
from typing import Literal

Normalization = Literal["token_mean", "sequence_mean", "constant_length"]


def token_weights(
    lengths: Sequence[int], normalization: Normalization, *, constant_length: int | None = None
) -> list[float]:
    """One weight per sequence, to be given to each of its tokens.

    Args:
        lengths: response tokens of every sequence of the optimizer step. A sequence without
            tokens has no token mean: it takes no part in `sequence_mean` (its weight, which
            nothing multiplies, is 0), but counts among the m of `constant_length`.
        normalization: see the module.
        constant_length: L, tokens; needed by `constant_length` and by nothing else.
    """
    num_tokens = sum(lengths)
    if normalization == "token_mean":
        return [1.0] * len(lengths)
    if normalization == "constant_length":
        assert constant_length is not None
        return [num_tokens / (len(lengths) * constant_length) for _ in lengths]
    num_sequences = sum(length > 0 for length in lengths)
    return [num_tokens / (num_sequences * length) if length else 0.0 for length in lengths]
