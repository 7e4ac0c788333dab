"""How far a batch may be trusted: the ESS of its ratios and of the two parts they split into.

The log-ratio of trainer `pi` to behaviour `b` splits at the proximal policy `p` (the trainer when
the rollout batch was first consumed):

    log(pi / b) = log(pi / p) + log(p / b)      drift within the batch + lag and serving mismatch
"""

from dataclasses import dataclass

from megatron_p3o.algorithms.ess import EssSums


@dataclass(frozen=True, kw_only=True, slots=True)
class TrustStats:
    """Trust statistics of one batch of tokens; plain numbers, so no gradient flows into them."""

    ess: float
    """Normalised ESS of pi / b, in [1/num_tokens, 1]."""
    mean_ratio: float
    """Mean of pi / b; 1 in expectation. ESS does not see a factor common to all ratios."""
    ratio_std: float
    """Population standard deviation of pi / b."""
    ess_drift: float
    """Normalised ESS of pi / p."""
    ess_mismatch: float
    """Normalised ESS of p / b."""
    num_tokens: int

    @classmethod
    def from_sums(cls, total: EssSums, drift: EssSums, mismatch: EssSums) -> "TrustStats":
        """Build from the merged sums of pi / b, pi / p and p / b over the same tokens.

        Raises:
            RunError: there are no tokens.
            NonFiniteError: a ratio is not finite, or all ratios underflowed.
        """
        return cls(
            ess=total.ess,
            mean_ratio=total.mean_ratio,
            ratio_std=total.ratio_std,
            ess_drift=drift.ess,
            ess_mismatch=mismatch.ess,
            num_tokens=int(total.num_tokens),
        )
