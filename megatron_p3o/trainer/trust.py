"""From scored microbatches to the trust statistics of an optimizer step: one all-reduce.

Partial sums of the policy ratios are float64 and additive, so one all-reduce over data-parallel
ranks gives the exact ESS of the whole step (`ess.scope: step`) or of each microbatch index over
ranks (`microbatch`, as the paper authors' code). The count of non-finite ratios rides in the same
all-reduce: all ranks reach the same verdict, and nobody waits for a rank that stopped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_p3o.algorithms import KL_ESTIMATORS, EssSums, TrustStats, first_nonfinite
from megatron_p3o.config import EssSection
from megatron_p3o.errors import NonFiniteError, RunError
from megatron_p3o.parallel.batching import Microbatch
from megatron_p3o.parallel.setup import ParallelContext
from megatron_p3o.parallel.step import MicrobatchScore
from megatron_p3o.trainer.metrics import Metric, Over

_PARTS = 3  # total, drift, mismatch


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTrust:
    """How far one optimizer step may trust its batch."""

    whole: TrustStats
    """Over all tokens of the step."""
    per_microbatch: tuple[TrustStats, ...]
    """What the loss of each microbatch takes; `whole` repeated when ess.scope is step."""
    metrics: dict[str, Metric]


def measure_trust(
    microbatches: Sequence[Microbatch],
    scores: Sequence[MicrobatchScore],
    context: ParallelContext,
    scope: EssSection,
    *,
    weight_version: int,
) -> StepTrust:
    """Exact trust statistics, the same on every rank.

    Args:
        microbatches: this rank's.
        scores: of the same microbatches under the present weights; empty off the last stage.
        context: where this rank stands.
        scope: which tokens one ESS speaks of.
        weight_version: of the weights that scored, for the error message.

    Raises:
        NonFiniteError: a ratio is NaN or infinite; names the first such sample on each rank.
        RunError: the step has no valid token.
    """
    count = len(microbatches)
    local = torch.zeros(count + 1, _PARTS * 4, dtype=torch.float64)
    largest = torch.full((1,), -torch.inf, dtype=torch.float64)
    bad_tokens = []
    for index, (microbatch, score) in enumerate(zip(microbatches, scores, strict=False)):
        parts = _log_ratios(microbatch, score)
        local[index] = torch.cat([EssSums.from_log_ratios(part).to_tensor() for part in parts])
        local[count, :3] += _token_sums(microbatch, score)
        if microbatch.num_tokens:
            largest = torch.maximum(largest, parts[0].max().double().cpu())
        bad_tokens += _describe_nonfinite(microbatch, score, parts[0], weight_version)
    sums = context.sum_tokens(local)
    _stop_if_nonfinite(sums[:count], bad_tokens, context)
    whole = _trust(sums[:count].sum(dim=0))
    if scope.scope == "step":
        per_microbatch = (whole,) * count
    else:
        # A microbatch index without any token on any rank has no loss term either.
        per_microbatch = tuple(_trust(row) if row[2] > 0 else whole for row in sums[:count])
    return StepTrust(
        whole=whole,
        per_microbatch=per_microbatch,
        metrics=_metrics(whole, sums[count], context.max_tokens(largest)),
    )


def _log_ratios(microbatch: Microbatch, score: MicrobatchScore) -> tuple[Tensor, Tensor, Tensor]:
    """(total, drift, mismatch): log(pi / b), log(pi / prox), log(prox / b), each [T]."""
    logprobs = score.logprobs.detach()
    proximal, rollout = microbatch.proximal(logprobs), microbatch.rollout_logprobs
    return logprobs - rollout, logprobs - proximal, proximal - rollout


def _token_sums(microbatch: Microbatch, score: MicrobatchScore) -> Tensor:
    """Sums over tokens of [k3 of the mismatch, |mismatch|, entropy], float64."""
    gap = _log_ratios(microbatch, score)[2].double()
    entropy = score.entropy.detach().double()
    return torch.stack([KL_ESTIMATORS["k3"](gap).sum(), gap.abs().sum(), entropy.sum()]).cpu()


def _trust(row: Tensor) -> TrustStats:
    total, drift, mismatch = (EssSums.from_tensor(part) for part in row.view(_PARTS, 4))
    return TrustStats.from_sums(total, drift, mismatch)


def _metrics(whole: TrustStats, token_sums: Tensor, largest: Tensor) -> dict[str, Metric]:
    k3, abs_gap, entropy = (token_sums[:3] / whole.num_tokens).tolist()
    return {
        "ess/step": Metric(whole.ess),
        "ess/step_min": Metric(whole.ess, Over.MIN),
        "ess/drift": Metric(whole.ess_drift),
        "ess/mismatch": Metric(whole.ess_mismatch),
        "ratio/mean": Metric(whole.mean_ratio),
        "ratio/std": Metric(whole.ratio_std),
        "ratio/max": Metric(float(largest.exp()), Over.MAX),
        "mismatch/k3": Metric(k3),
        "mismatch/abs_logprob_mean": Metric(abs_gap),
        "entropy/mean": Metric(entropy),
    }


def _describe_nonfinite(
    microbatch: Microbatch, score: MicrobatchScore, log_ratios: Tensor, weight_version: int
) -> list[str]:
    token = first_nonfinite(log_ratios)
    if token is None:
        return []
    name, position = microbatch.locate_token(token)
    return [
        f"sample {name}, response position {position} (token id {int(microbatch.labels[token])}): "
        f"trainer log-prob {float(score.logprobs[token])} at weight version {weight_version}, "
        f"rollout log-prob {float(microbatch.rollout_logprobs[token])}"
    ]


def _stop_if_nonfinite(sums: Tensor, bad_tokens: list[str], context: ParallelContext) -> None:
    rows = sums.view(-1, _PARTS, 4)
    if not (rows[..., 3] > 0).any():
        if rows[:, 0, 2].sum() == 0:
            raise RunError(
                "the optimizer step has no valid response token; check that rewards do not all "
                "fail and that responses are not empty. Nothing was stepped"
            )
        return
    # Every rank is here, since all saw the same sums: a further collective is safe.
    described = [text for texts in context.gather_objects(bad_tokens) for text in texts]
    raise NonFiniteError(
        f"non-finite policy ratio; nothing was stepped and the last checkpoint is valid. First on "
        f"each rank: {'; '.join(described[:8])}"
    )
