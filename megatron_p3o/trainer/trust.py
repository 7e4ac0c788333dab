"""From scored microbatches to the trust statistics of an optimizer step: one all-reduce.

Partial sums of the policy ratios are float64 and additive, so one all-reduce over data-parallel
and context ranks gives the exact ESS of the whole step (`ess.scope: step`) or of each microbatch
index over ranks (`microbatch`, as the paper authors' code). The count of non-finite log-probs
rides in the same all-reduce: all ranks reach the same verdict, and nobody waits for a rank that
stopped. So do the sums of every sequence, kept by the sequence's place in the step: they are whole
wherever the sequence's tokens lie, be it one rank or the shards of several.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_p3o.algorithms import (
    KL_ESTIMATORS,
    NUM_BINS,
    EssSums,
    TrustStats,
    first_nonfinite,
    ratio_counts,
    ratio_quantile,
    sequence_stats,
    sequence_sums,
)
from megatron_p3o.config import EssSection
from megatron_p3o.errors import NonFiniteError, RunError
from megatron_p3o.parallel.batching import Microbatch
from megatron_p3o.parallel.setup import ParallelContext
from megatron_p3o.parallel.step import MicrobatchScore
from megatron_p3o.trainer.metrics import Metric, Over
from megatron_p3o.types import SequenceStats

_PARTS = 3  # total, drift, mismatch
_MAX_LAG = 8  # version lags from here on share one ESS
_QUANTILES = (1, 10, 50, 90, 99)  # percent
_TOKEN_SUMS = (
    "mismatch/k3",
    "mismatch/k3_reverse",
    "mismatch/abs_logprob_mean",
    "ratio/k3",
    "ratio/k3_reverse",
    "entropy/mean",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTrust:
    """How far one optimizer step may trust its batch."""

    whole: TrustStats
    """Over all tokens of the step."""
    per_microbatch: tuple[TrustStats, ...]
    """What the loss of each microbatch takes; `whole` repeated when ess.scope is step."""
    sequences: tuple[SequenceStats | None, ...]
    """What each microbatch's tokens know of their sequences; None where it was not asked for."""
    metrics: dict[str, Metric]


def measure_trust(
    microbatches: Sequence[Microbatch],
    scores: Sequence[MicrobatchScore],
    context: ParallelContext,
    scope: EssSection,
    *,
    weight_version: int,
    with_sequences: bool = False,
) -> StepTrust:
    """Exact trust statistics, the same on every rank.

    Args:
        microbatches: this rank's.
        scores: of the same microbatches under the present weights; empty off the last stage.
        context: where this rank stands.
        scope: which tokens one ESS speaks of.
        weight_version: of the weights that scored, for the error message.
        with_sequences: also make `StepTrust.sequences`.

    Raises:
        NonFiniteError: a ratio is NaN or infinite, or a reference log-prob; names the first such
            sample on each rank.
        RunError: the step has no valid token.
    """
    largest, num_sequences = _maxima(microbatches, scores, context)
    sums = _Sums.zero(len(microbatches), num_sequences if with_sequences else 0)
    bad_tokens = []
    for index, (microbatch, score) in enumerate(zip(microbatches, scores, strict=False)):
        sums.add(index, microbatch, score)
        bad_tokens += _describe_nonfinite(microbatch, score, weight_version)
    sums = sums.reduced(context)
    _stop_if_nonfinite(sums, bad_tokens, context)
    whole = _trust(sums.ratios.sum(dim=0))
    if scope.scope == "step":
        per_microbatch = (whole,) * len(microbatches)
    else:
        # A microbatch index without any token on any rank has no loss term either.
        per_microbatch = tuple(_trust(row) if row[0, 2] > 0 else whole for row in sums.ratios)
    return StepTrust(
        whole=whole,
        per_microbatch=per_microbatch,
        sequences=tuple(
            _sequence_stats(microbatch, sums.sequences) if with_sequences else None
            for microbatch in microbatches
        ),
        metrics=_metrics(whole, sums, largest),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sums:
    """Everything that is summed over ranks; float64 on the CPU."""

    ratios: Tensor  # [microbatches, 3, 4] EssSums of pi / b, pi / p and p / b
    lags: Tensor  # [_MAX_LAG + 1, 4] EssSums of p / b by version lag
    histogram: Tensor  # [NUM_BINS] of pi / b
    tokens: Tensor  # [len(_TOKEN_SUMS)]
    nonfinite_reference: Tensor  # [1]
    sequences: Tensor  # [2, sequences of the step]

    @classmethod
    def zero(cls, num_microbatches: int, num_sequences: int) -> "_Sums":
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64)

        return cls(
            ratios=zeros(num_microbatches, _PARTS, 4),
            lags=zeros(_MAX_LAG + 1, 4),
            histogram=zeros(NUM_BINS),
            tokens=zeros(len(_TOKEN_SUMS)),
            nonfinite_reference=zeros(1),
            sequences=zeros(2, num_sequences),
        )

    def add(self, index: int, microbatch: Microbatch, score: MicrobatchScore) -> None:
        parts = _log_ratios(microbatch, score)
        total, _, mismatch = parts
        self.ratios[index] = torch.stack([EssSums.from_log_ratios(p).to_tensor() for p in parts])
        lags = _token_lags(microbatch).clamp(0, _MAX_LAG)
        self.lags.add_(EssSums.by_group(mismatch, lags, _MAX_LAG + 1).cpu())
        self.histogram.add_(ratio_counts(total).cpu())
        self.tokens.add_(_token_sums(total, mismatch, score))
        if microbatch.reference_logprobs is not None:
            bad = ~microbatch.reference_logprobs.isfinite()
            self.nonfinite_reference.add_(bad.sum().cpu())
        num_sequences = self.sequences.shape[1]
        if num_sequences:
            places = _of_tokens(microbatch, [s.sequence for s in microbatch.samples])
            self.sequences.add_(sequence_sums(total, mismatch, places, num_sequences).cpu())

    def reduced(self, context: ParallelContext) -> "_Sums":
        """Complete sums, on every rank."""
        mine = [getattr(self, name) for name in self.__dataclass_fields__]
        flat = context.sum_tokens(torch.cat([part.flatten() for part in mine]))
        parts = flat.split([part.numel() for part in mine])
        return _Sums(
            **{
                name: part.view_as(own)
                for name, part, own in zip(self.__dataclass_fields__, parts, mine, strict=True)
            }
        )


def _maxima(
    microbatches: Sequence[Microbatch],
    scores: Sequence[MicrobatchScore],
    context: ParallelContext,
) -> tuple[float, int]:
    """(largest log(pi / b), sequences of the whole step), over all ranks."""
    largest, last = -torch.inf, -1
    for microbatch, score in zip(microbatches, scores, strict=False):
        if microbatch.num_tokens:
            largest = max(largest, float(_log_ratios(microbatch, score)[0].max()))
        last = max([last, *(scored.sequence for scored in microbatch.samples)])
    maxima = context.max_tokens(torch.tensor([largest, last], dtype=torch.float64))
    return float(maxima[0]), int(maxima[1]) + 1


def _log_ratios(microbatch: Microbatch, score: MicrobatchScore) -> tuple[Tensor, Tensor, Tensor]:
    """(total, drift, mismatch): log(pi / b), log(pi / prox), log(prox / b), each [T]."""
    logprobs = score.logprobs.detach()
    proximal, rollout = microbatch.proximal(logprobs), microbatch.rollout_logprobs
    return logprobs - rollout, logprobs - proximal, proximal - rollout


def _of_tokens(microbatch: Microbatch, of_samples: Sequence[int]) -> Tensor:
    """`[T]` int64: every token gets its sample's value."""
    values = torch.tensor(of_samples, dtype=torch.int64, device=microbatch.token_samples.device)
    return values[microbatch.token_samples]


def _token_lags(microbatch: Microbatch) -> Tensor:
    """`[T]` int64: weight versions between each token's sampling and the first use of its batch."""
    lags = _of_tokens(microbatch, [scored.lag for scored in microbatch.samples])
    for index, scored in enumerate(microbatch.samples):
        oldest = scored.sample.weight_version_min
        for span in scored.sample.version_spans:
            positions = microbatch.token_positions
            is_inside = (positions >= span.start) & (positions < span.stop)
            lags -= (span.version - oldest) * (is_inside & (microbatch.token_samples == index))
    return lags


def _token_sums(total: Tensor, mismatch: Tensor, score: MicrobatchScore) -> Tensor:
    """Sums over tokens in the order of `_TOKEN_SUMS`, float64."""
    k3 = KL_ESTIMATORS["k3"]
    total, mismatch = total.double(), mismatch.double()
    values = [
        k3(mismatch),
        k3(-mismatch),
        mismatch.abs(),
        k3(total),
        k3(-total),
        score.entropy.detach().double(),
    ]
    return torch.stack([value.sum() for value in values]).cpu()


def _sequence_stats(microbatch: Microbatch, sums: Tensor) -> SequenceStats:
    samples = microbatch.samples
    places = torch.tensor([s.sequence for s in samples], dtype=torch.int64)
    lengths = torch.tensor([s.sample.num_response_tokens for s in samples], dtype=torch.float64)
    device = microbatch.token_samples.device
    return sequence_stats(sums[:, places].to(device), lengths.to(device), microbatch.token_samples)


def _trust(row: Tensor) -> TrustStats:
    total, drift, mismatch = (EssSums.from_tensor(part) for part in row)
    return TrustStats.from_sums(total, drift, mismatch)


def _metrics(whole: TrustStats, sums: _Sums, largest: float) -> dict[str, Metric]:
    means = (sums.tokens / whole.num_tokens).tolist()
    lags = {
        f"ess/lag_{lag}" + ("_plus" if lag == _MAX_LAG else ""): Metric(
            EssSums.from_tensor(row).ess
        )
        for lag, row in enumerate(sums.lags)
        if row[2] > 0
    }
    return {
        "ess/step": Metric(whole.ess),
        "ess/step_min": Metric(whole.ess, Over.MIN),
        "ess/drift": Metric(whole.ess_drift),
        "ess/mismatch": Metric(whole.ess_mismatch),
        **lags,
        "ratio/mean": Metric(whole.mean_ratio),
        "ratio/std": Metric(whole.ratio_std),
        "ratio/max": Metric(math.exp(largest), Over.MAX),
        **{
            f"ratio/p{percent:02d}": Metric(ratio_quantile(sums.histogram, percent / 100))
            for percent in _QUANTILES
        },
        **{name: Metric(mean) for name, mean in zip(_TOKEN_SUMS, means, strict=True)},
        "tokens/effective": Metric(whole.ess * whole.num_tokens, Over.SUM),
    }


def _describe_nonfinite(
    microbatch: Microbatch, score: MicrobatchScore, weight_version: int
) -> list[str]:
    token = first_nonfinite(_log_ratios(microbatch, score)[0])
    reference = microbatch.reference_logprobs
    if token is not None:
        numbers = (
            f"trainer log-prob {float(score.logprobs[token])} at weight version {weight_version}, "
            f"rollout log-prob {float(microbatch.rollout_logprobs[token])}"
        )
    elif reference is not None and not reference.isfinite().all():
        token = int((~reference.isfinite()).nonzero()[0])
        numbers = f"reference log-prob {float(reference[token])}"
    else:
        return []
    name, position = microbatch.locate_token(token)
    label = int(microbatch.labels[token])
    return [f"sample {name}, response position {position} (token id {label}): {numbers}"]


def _stop_if_nonfinite(sums: _Sums, bad_tokens: list[str], context: ParallelContext) -> None:
    if not (sums.ratios[..., 3] > 0).any() and not sums.nonfinite_reference.any():
        if sums.ratios[:, 0, 2].sum() == 0:
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
