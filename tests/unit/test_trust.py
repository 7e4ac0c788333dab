"""Trust statistics of a step: exact whoever holds which tokens, a sequence cut in two included."""

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_p3o.config import EssSection
from megatron_p3o.errors import NonFiniteError
from megatron_p3o.parallel.batching import Microbatch, collate
from megatron_p3o.parallel.context import SequenceShard
from megatron_p3o.parallel.step import MicrobatchScore
from megatron_p3o.trainer.trust import StepTrust, measure_trust
from megatron_p3o.types import Sample, ScoredSample, VersionSpan

CPU = torch.device("cpu")
WHOLE = SequenceShard(rank=0, size=1, multiple=1)
LENGTHS = (3, 1, 5, 2)
LAGS = (0, 0, 2, 40)


class Ranks:
    """Reductions between threads that stand for ranks."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._values: list[Any] = [None] * size

    def context(self, rank: int) -> Any:
        return SimpleNamespace(
            sum_tokens=lambda x: torch.stack(self._exchange(rank, x)).sum(0),
            max_tokens=lambda x: torch.stack(self._exchange(rank, x)).amax(0),
            gather_objects=lambda x: self._exchange(rank, x),
        )

    def _exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait(timeout=30)
        values = list(self._values)
        self._barrier.wait(timeout=30)
        return values


def samples() -> list[ScoredSample]:
    generator = np.random.default_rng(0)
    return [
        ScoredSample(
            sample=Sample(
                prompt_id=str(place),
                sample_index=0,
                prompt_ids=(1, 2),
                response_ids=tuple(range(length)),
                rollout_logprobs=tuple(-generator.random(length) - 0.1),
                finish_reason="stop",
                weight_version_min=0,
                weight_version_max=0,
            ),
            advantage=1.0,
            sequence=place,
            lag=LAGS[place],
        )
        for place, length in enumerate(LENGTHS)
    ]


def whole() -> tuple[Microbatch, MicrobatchScore]:
    batch = collate(samples(), CPU, WHOLE, packed=False)
    generator = torch.Generator().manual_seed(1)
    proximal = batch.rollout_logprobs + 0.3 * torch.randn(batch.num_tokens, generator=generator)
    logprobs = proximal + 0.2 * torch.randn(batch.num_tokens, generator=generator)
    batch = batch.with_proximal(proximal).with_reference(logprobs - 0.1)
    return batch, MicrobatchScore(logprobs=logprobs, entropy=-logprobs)


def part(whole: tuple[Microbatch, MicrobatchScore], keep: Tensor) -> tuple[Any, Any]:
    """The kept tokens alone, as a context shard holds them: the samples stay whole."""
    batch, score = whole
    of_tokens = {
        f.name: value[keep]
        for f in fields(batch)
        if isinstance(value := getattr(batch, f.name), Tensor) and value.shape == keep.shape
    }
    score = MicrobatchScore(logprobs=score.logprobs[keep], entropy=score.entropy[keep])
    return replace(batch, **of_tokens), score


def measure(ranks: Sequence[Sequence[tuple[Microbatch, MicrobatchScore]]]) -> list[StepTrust]:
    shared = Ranks(len(ranks))

    def run(rank: int) -> StepTrust:
        batches, scores = zip(*ranks[rank], strict=True)
        return measure_trust(
            batches,
            scores,
            shared.context(rank),
            EssSection(),
            weight_version=7,
            with_sequences=True,
        )

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, range(len(ranks))))


def test_tokens_of_a_sample_that_spans_versions_count_by_their_own_lag() -> None:
    sample = Sample(
        prompt_id="0",
        sample_index=0,
        prompt_ids=(1, 2),
        response_ids=(4, 5, 6, 7, 8),
        rollout_logprobs=(-1.0, -0.5, -2.0, -0.7, -0.9),
        finish_reason="stop",
        weight_version_min=4,
        weight_version_max=5,
        version_spans=(VersionSpan(4, 0, 2), VersionSpan(5, 2, 5)),
    )
    batch = collate([ScoredSample(sample=sample, advantage=1.0, lag=1)], CPU, WHOLE, packed=False)
    gaps = torch.tensor([0.5, -0.5, 0.1, 0.3, -0.2])
    score = MicrobatchScore(logprobs=batch.rollout_logprobs + gaps, entropy=torch.zeros(5))
    (trust,) = measure([[(batch, score)]])
    ratios = gaps.double().exp().numpy()

    def ess(w: np.ndarray) -> float:
        return w.sum() ** 2 / (len(w) * (w**2).sum())

    assert trust.metrics["ess/lag_1"].value == pytest.approx(ess(ratios[:2]), rel=1e-6)
    assert trust.metrics["ess/lag_0"].value == pytest.approx(ess(ratios[2:]), rel=1e-6)
    assert "ess/lag_2" not in trust.metrics


def test_metrics_are_those_of_the_formulas() -> None:
    batch, score = whole()
    (trust,) = measure([[(batch, score)]])
    assert batch.proximal_logprobs is not None
    logp, prox = score.logprobs.double().numpy(), batch.proximal_logprobs.double().numpy()
    rho = np.exp(score.logprobs - batch.rollout_logprobs).double().numpy()
    gap = (batch.proximal_logprobs - batch.rollout_logprobs).double().numpy()

    def ess(w: np.ndarray) -> float:
        return w.sum() ** 2 / (len(w) * (w**2).sum())

    got = {name: metric.value for name, metric in trust.metrics.items()}
    lag = np.repeat(LAGS, LENGTHS)
    want = {
        "ess/step": ess(rho),
        "ess/step_min": ess(rho),
        "ess/drift": ess(np.exp(logp - prox)),
        "ess/mismatch": ess(np.exp(gap)),
        "ess/lag_0": ess(np.exp(gap[lag == 0])),
        "ess/lag_2": ess(np.exp(gap[lag == 2])),
        "ess/lag_8_plus": ess(np.exp(gap[lag == 40])),
        "ratio/mean": rho.mean(),
        "ratio/std": rho.std(),
        "ratio/max": rho.max(),
        "mismatch/k3": np.mean(gap + np.exp(-gap) - 1),
        "mismatch/k3_reverse": np.mean(np.exp(gap) - 1 - gap),
        "mismatch/abs_logprob_mean": np.abs(gap).mean(),
        "ratio/k3": np.mean(np.log(rho) + 1 / rho - 1),
        "ratio/k3_reverse": np.mean(rho - 1 - np.log(rho)),
        "entropy/mean": -logp.mean(),
        "tokens/effective": ess(rho) * len(rho),
    }
    for percent in (1, 10, 50, 90, 99):
        exact = np.quantile(rho, percent / 100, method="inverted_cdf")
        assert got.pop(f"ratio/p{percent:02d}") == pytest.approx(exact, rel=0.0051)
    assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_nothing_depends_on_how_tokens_are_shared(num_ranks: int) -> None:
    everything = whole()
    (reference,) = measure([[everything]])
    tokens = torch.arange(everything[0].num_tokens)
    # Token i goes to rank i % num_ranks: every sequence of two tokens or more is cut. Each rank
    # has its own number of microbatches' worth of tokens, some with none.
    shards = [tokens % num_ranks == rank for rank in range(num_ranks)]
    none = torch.zeros_like(tokens, dtype=torch.bool)
    results = measure([[part(everything, s), part(everything, none)] for s in shards])
    assert reference.sequences[0] is not None
    for shard, trust in zip(shards, results, strict=True):
        assert trust.metrics.keys() == reference.metrics.keys()
        for name, metric in trust.metrics.items():
            assert metric.value == pytest.approx(reference.metrics[name].value, rel=1e-12), name
        assert trust.whole.ess == pytest.approx(reference.whole.ess, rel=1e-12)
        assert trust.per_microbatch == (trust.whole, trust.whole)
        assert trust.sequences[0] is not None
        for name in ("log_ratios", "mismatch", "lengths"):
            got = getattr(trust.sequences[0], name)
            want = getattr(reference.sequences[0], name)[shard]
            torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def test_sequences_know_their_means_and_lengths() -> None:
    batch, score = whole()
    (trust,) = measure([[(batch, score)]])
    stats = trust.sequences[0]
    assert stats is not None
    log_ratios = (score.logprobs - batch.rollout_logprobs).split(LENGTHS)
    want = torch.cat([part.mean().expand(len(part)) for part in log_ratios])
    torch.testing.assert_close(stats.log_ratios, want, rtol=1e-5, atol=1e-7)
    assert stats.lengths.tolist() == [float(n) for n in LENGTHS for _ in range(n)]


def test_a_reference_that_is_not_finite_is_named_on_every_rank() -> None:
    batch, score = whole()
    assert batch.reference_logprobs is not None
    reference = batch.reference_logprobs.clone()
    reference[5] = -math.inf
    bad = batch.with_reference(reference)
    halves = [torch.arange(batch.num_tokens) < 8, torch.arange(batch.num_tokens) >= 8]
    shared = Ranks(2)

    def run(rank: int) -> str:
        mine = part((bad, score), halves[rank])
        with pytest.raises(NonFiniteError) as caught:
            measure_trust(
                [mine[0]], [mine[1]], shared.context(rank), EssSection(), weight_version=7
            )
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    assert first == second
    assert "sample 2/0, response position 1 (token id 1): reference log-prob -inf" in first
