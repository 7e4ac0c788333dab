"""Normalised effective sample size (ESS) of policy ratios, from sums that merge exactly.

With `w_t = pi(t) / b(t)` the ratio of trainer to behaviour policy at each of n tokens,

    ESS = (sum w)^2 / (n * sum w^2) = 1 / (1 + CV^2)        in [1/n, 1]

where CV is the coefficient of variation of w. 1 means that all ratios are equal, 1/n that one
token carries all the weight (arXiv:2605.12380, after arXiv:1905.01756). `sum w`, `sum w^2` and n
are additive, so shards and microbatches merge with `+` or one all-reduce by SUM, and the ESS of a
whole optimizer step does not depend on how the step was split.

Everything is float64. Nothing here falls back to a default: a ratio that is NaN, infinite or too
large is counted instead of summed, and reading the ESS of such sums raises. ESS does not see a
factor common to all ratios, so `mean_ratio` must be watched beside it.
"""

import math
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_p3o.errors import NonFiniteError, RunError

_ROUNDING = 1e-6  # how far outside [1/n, 1] rounding of the sums may carry the quotient


@dataclass(frozen=True, slots=True)
class EssSums:
    """Additive sums over tokens; all fields are float64 counts or sums.

    Example:
        EssSums.from_log_ratios(torch.tensor([0.0, math.log(3.0)])) == EssSums(4.0, 10.0, 2.0)
        # ess = 16 / (2 * 10) = 0.8
    """

    sum_w: float
    sum_w2: float
    num_tokens: float
    """All tokens, with the non-finite ones."""
    num_nonfinite: float = 0.0
    """Tokens left out of `sum_w` and `sum_w2` because w or w^2 is no finite float64."""

    @classmethod
    def zero(cls) -> "EssSums":
        """The sums of no tokens."""
        return cls(0.0, 0.0, 0.0)

    @classmethod
    def from_log_ratios(cls, log_ratios: Tensor, mask: Tensor | None = None) -> "EssSums":
        """Sum `exp(log_ratios)` and its square in float64.

        Args:
            log_ratios: any shape and float dtype, nats; gradient is not followed.
            mask: bool, same shape; tokens that are False do not count, whatever their value.
        """
        if mask is not None:
            assert mask.shape == log_ratios.shape, (mask.shape, log_ratios.shape)
            log_ratios = log_ratios[mask.bool()]
        ratios, finite = _ratios(log_ratios)
        ratios = ratios[finite]
        sum_w, sum_w2, num_finite = torch.stack(
            [ratios.sum(), ratios.square().sum(), finite.sum().double()]
        ).tolist()
        return cls(sum_w, sum_w2, float(log_ratios.numel()), log_ratios.numel() - num_finite)

    @staticmethod
    def by_group(log_ratios: Tensor, group: Tensor, num_groups: int) -> Tensor:
        """The sums of every group of tokens at once.

        Args:
            log_ratios: `[T]`, as for `from_log_ratios`.
            group: `[T]` int64, which of the groups each token belongs to.
            num_groups: their number.

        Returns:
            `[num_groups, 4]` float64, additive; `from_tensor` reads a row.
        """
        ratios, finite = _ratios(log_ratios)
        kept = torch.where(finite, ratios, 0.0)
        rows = torch.stack([kept, kept.square(), torch.ones_like(kept), (~finite).double()], dim=1)
        return rows.new_zeros(num_groups, 4).index_add_(0, group, rows)

    def __add__(self, other: "EssSums") -> "EssSums":
        return EssSums(
            self.sum_w + other.sum_w,
            self.sum_w2 + other.sum_w2,
            self.num_tokens + other.num_tokens,
            self.num_nonfinite + other.num_nonfinite,
        )

    def to_tensor(self, device: torch.device | str | None = None) -> Tensor:
        """`[4]` float64 tensor of the fields in order, to be all-reduced by SUM."""
        fields = [self.sum_w, self.sum_w2, self.num_tokens, self.num_nonfinite]
        return torch.tensor(fields, dtype=torch.float64, device=device)

    @classmethod
    def from_tensor(cls, sums: Tensor) -> "EssSums":
        """Inverse of `to_tensor`."""
        return cls(*sums.tolist())

    @property
    def ess(self) -> float:
        """Normalised ESS in [1/n, 1].

        Raises:
            RunError: there are no tokens.
            NonFiniteError: a ratio or a sum is not finite, or all ratios underflowed.
        """
        self._require_usable()
        # As a product of quotients, since (sum w)^2 may overflow where the ESS does not.
        ess = (self.sum_w / self.num_tokens) * (self.sum_w / self.sum_w2)
        least = 1.0 / self.num_tokens
        assert least * (1 - _ROUNDING) <= ess <= 1 + _ROUNDING, self
        return min(1.0, max(least, ess))

    @property
    def mean_ratio(self) -> float:
        """Mean of w. Raises as `ess` does."""
        self._require_usable()
        return self.sum_w / self.num_tokens

    @property
    def ratio_std(self) -> float:
        """Population standard deviation of w. Raises as `ess` does."""
        return self.mean_ratio * math.sqrt(1.0 / self.ess - 1.0)

    def _require_usable(self) -> None:
        # Non-finite first: where every token is bad, that is the news.
        if self.num_nonfinite > 0 or not math.isfinite(self.sum_w2):
            raise NonFiniteError(
                f"{self.num_nonfinite:.0f} of {self.num_tokens:.0f} policy ratios are NaN, "
                f"infinite or too large for float64 (sum of squares {self.sum_w2}); the log-probs "
                "of trainer and rollout engine must be finite and of the same tokens. Nothing "
                "was stepped; check the weights and the rollout of these samples"
            )
        if self.num_tokens == 0:
            raise RunError(
                "no valid response token to take the ESS of; check that responses are not empty "
                "and that not every reward failed. Nothing was stepped"
            )
        if self.sum_w2 < sys.float_info.min:
            raise NonFiniteError(
                f"all {self.num_tokens:.0f} policy ratios underflow (sum of squares "
                f"{self.sum_w2}): the trainer gives the sampled tokens no probability. Nothing "
                "was stepped; check that trainer and rollout engine hold the same weights"
            )


def first_nonfinite(log_ratios: Tensor) -> int | None:
    """Index of the first of `[T]` log-ratios that `EssSums` counts as non-finite, or None."""
    _, finite = _ratios(log_ratios)
    offending = torch.nonzero(~finite)
    return int(offending[0]) if len(offending) else None


def _ratios(log_ratios: Tensor) -> tuple[Tensor, Tensor]:
    """float64 ratios, and where the log-ratio, the ratio and its square are all finite."""
    log_ratios = log_ratios.detach().double()
    ratios = log_ratios.exp()
    # -inf gives the finite ratio 0, but no sampled token may have probability 0.
    return ratios, torch.isfinite(log_ratios) & torch.isfinite(ratios.square())
