"""The first question to a new pair of trainer and servers: do they compute the same log-probs?

Servers sample a few responses under the weights just published; the trainer scores the same
tokens. What is left is the serving mismatch: precision, kernels, or a mistake in either, such as
another temperature, chat template or RoPE. A mistake shows as a gap that no precision explains.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_p3o.config import RunConfig
from megatron_p3o.errors import RunError
from megatron_p3o.parallel.batching import Microbatch
from megatron_p3o.parallel.step import MicrobatchScore
from megatron_p3o.trainer.policy import Policy
from megatron_p3o.types import Sample, ScoredSample

_FP32_GAP = 1e-4
_REDUCED_PRECISION_GAP = 0.05

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityGap:
    """|server log-prob - trainer log-prob| of one server's samples (nats)."""

    mean: float
    max: float
    num_tokens: int


def check_parity(
    config: RunConfig, policy: Policy, samples: Mapping[str, Sequence[Sample]]
) -> dict[str, ParityGap]:
    """Compare log-probs by server; nothing to do without samples. Collective.

    Args:
        config: of the run.
        policy: with the weights that the samples were made with.
        samples: by server, the same on every rank.

    Returns:
        The gap of each server, the same on every rank.

    Raises:
        RunError: on every rank: a mean gap exceeds `rollout.parity_check.max_mean_gap`.
    """
    if not samples:
        return {}
    gaps = dict(zip(samples, _gaps(policy, list(samples.values())), strict=True))
    if policy.context.rank == 0:
        for name, gap in gaps.items():
            _log.info(
                "log-probs of %s against the trainer's: |gap| mean %.2e, max %.2e over %d tokens",
                *(name, gap.mean, gap.max, gap.num_tokens),
            )
    limit = config.rollout.parity_check.max_mean_gap or _default_limit(config)
    for name, gap in gaps.items():
        if not gap.mean <= limit:
            raise RunError(
                f"log-probs of {name} differ from the trainer's by {gap.mean:.3g} nats in the mean "
                f"(at most {gap.max:.3g}, {gap.num_tokens} tokens) under the same weights; "
                f"training needs rollout.parity_check.max_mean_gap={limit}. Check that the server "
                "serves this model and precision, or raise the bound if the gap is meant"
            )
    return gaps


def _default_limit(config: RunConfig) -> float:
    is_exact = config.precision.trainer == config.precision.rollout == "fp32"
    return _FP32_GAP if is_exact else _REDUCED_PRECISION_GAP


def _gaps(policy: Policy, by_server: Sequence[Sequence[Sample]]) -> list[ParityGap]:
    numbered = [
        replace(sample, prompt_id=str(number))
        for number, samples in enumerate(by_server)
        for sample in samples
    ]
    microbatches = policy.microbatches(
        [ScoredSample(sample=sample, advantage=0.0) for sample in numbered]
    )
    sums = torch.zeros(len(by_server), 2, dtype=torch.float64)  # |gap|, tokens
    largest = torch.zeros(len(by_server), dtype=torch.float64)
    for microbatch, score in zip(microbatches, policy.score(microbatches), strict=False):
        numbers_T, gaps_T = _token_gaps(microbatch, score)
        ones_T = torch.ones_like(gaps_T)
        sums.index_add_(0, numbers_T, torch.stack([gaps_T, ones_T], dim=1))
        largest.scatter_reduce_(0, numbers_T, gaps_T, "amax")
    sums, largest = policy.context.sum_tokens(sums), policy.context.max_tokens(largest)
    return [
        ParityGap(mean=total / tokens, max=most, num_tokens=int(tokens))
        for (total, tokens), most in zip(sums.tolist(), largest.tolist(), strict=True)
    ]


def _token_gaps(microbatch: Microbatch, score: MicrobatchScore) -> tuple[Tensor, Tensor]:
    """(number of the server [T], |gap| [T] float64), on the CPU."""
    servers = [int(scored.sample.prompt_id) for scored in microbatch.samples]
    numbers = torch.tensor(servers, dtype=torch.int64)[microbatch.token_samples.cpu()]
    gaps = (score.logprobs.double() - microbatch.rollout_logprobs.double()).abs()
    return numbers, gaps.detach().cpu()
