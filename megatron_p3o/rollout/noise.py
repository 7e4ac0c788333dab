"""Sampling noise that depends on what is sampled, not on who samples it.

Token `position` of a sample is drawn by inverting the distribution function at one uniform number
u, a keyed hash of (seed, step, prompt, sample, position). So the same seed gives the same samples
for every number of ranks, batch composition and order of work, as far as rounding lets the
distributions agree.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

# Shape legend: B sequences, V vocabulary.

_UNIFORM_BITS = 53  # all that a float64 in [0, 1) can resolve evenly


@dataclass(frozen=True, slots=True)
class SampleNoise:
    """The uniform numbers of one sample."""

    seed: int
    step: int
    prompt_id: str
    sample_index: int

    def uniform(self, position: int) -> float:
        """u in [0, 1) for the response token at `position`; stable across machines and versions."""
        # repr keeps the fields apart whatever the prompt id holds.
        key = repr((self.seed, self.step, self.prompt_id, self.sample_index, position))
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> (64 - _UNIFORM_BITS)) / 2.0**_UNIFORM_BITS


def invert_cdf(cdf_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The token at which the cumulated probability first exceeds u, [B] int64.

    A row that holds NaN gives the last token; its log-prob is NaN, which the caller must check.

    Args:
        cdf_BV: cumulated probabilities, up to a common factor per row. float64: in float32 the
            rounding of a large vocabulary's sum would move tokens.
        uniform_B: float64 in [0, 1).
    """
    total_B = cdf_BV[:, -1]
    # u * total may round up to the total, beyond which there is no token.
    below_total_B = torch.nextafter(total_B, torch.zeros_like(total_B))
    target_B = torch.minimum(uniform_B * total_B, below_total_B)
    # The first cumulated value strictly above the target belongs to a token of positive weight.
    tokens_B = torch.searchsorted(cdf_BV, target_B[:, None], right=True).squeeze(1)
    return tokens_B.clamp_max(cdf_BV.shape[1] - 1)
