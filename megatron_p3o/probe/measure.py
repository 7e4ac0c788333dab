"""Samples as each precision serves them, scores, metrics.

For each precision the engine samples as in a run, with its own log-probs, and the exact model
scores the same tokens. All precisions share their prompts and sampling noise, so that responses
are equal until a rounding moves a token. An ablation scores one fixed set of samples, the exact
engine's. At most three copies of the model are held: weights, exact model, engine.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_p3o.data import RewardRequest, RewardRunner, check_failures
from megatron_p3o.probe.inputs import ProbeInputs
from megatron_p3o.probe.parts import (
    Ablation,
    RoundedParts,
    ablation_numerics,
    ablations,
)
from megatron_p3o.probe.precisions import ServingPrecision, parse_precision
from megatron_p3o.probe.scorer import Scorer
from megatron_p3o.probe.statistics import (
    Measured,
    PositionBucket,
    by_position,
    mean_by_prompt,
    mismatch_metrics,
)
from megatron_p3o.rollout import EmbeddedEngine, Generation, GenerationRequest, ServedNumerics

Progress = Callable[[str], None]
"""Told what begins."""
_EXACT = parse_precision("fp32")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionResult:
    """One way of serving."""

    precision: ServingPrecision
    metrics: Mapping[str, Measured]
    """By the names of docs/metrics.md."""
    positions: Sequence[PositionBucket]


@dataclass(frozen=True, kw_only=True, slots=True)
class AblationRow:
    """One part of the model."""

    ablation: Ablation
    metrics: Mapping[str, Measured]
    share: float | None
    """Its k3 over that of the whole; None where that is 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AblationResult:
    """Rows by their k3, the largest first."""

    precision: ServingPrecision
    rows: Sequence[AblationRow]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """All that was measured."""

    inputs: ProbeInputs
    samples_per_prompt: int
    device: str
    precisions: Sequence[PrecisionResult]
    ablation: AblationResult | None


class Bench:
    """What measurements share."""

    def __init__(self, inputs: ProbeInputs, samples_per_prompt: int, progress: Progress) -> None:
        self.inputs = inputs
        self.samples_per_prompt = samples_per_prompt
        self.progress = progress
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.scorer = Scorer(
            inputs.model_dir,
            inputs.weights,
            temperature=inputs.sampling.temperature,
            batch_size=inputs.batch_size,
            device=self.device,
        )
        self._samples: dict[str, list[Generation]] = {}
        self._places = {prompt.key: index for index, prompt in enumerate(inputs.prompts)}

    def samples(self, precision: ServingPrecision) -> list[Generation]:
        """Drawn as the precision is served, once."""
        if precision.name not in self._samples:
            num_prompts = len(self.inputs.prompts)
            self.progress(f"{precision.name}: {num_prompts} x {self.samples_per_prompt} samples")
            requests = [
                GenerationRequest(
                    prompt_id=prompt.key,
                    prompt_ids=prompt.token_ids,
                    num_samples=self.samples_per_prompt,
                    step=0,
                )
                for prompt in self.inputs.prompts
            ]
            self._samples[precision.name] = self._engine(precision).generate(requests)
        return self._samples[precision.name]

    def _engine(self, precision: ServingPrecision) -> EmbeddedEngine:
        inputs, is_bf16 = self.inputs, precision.section.rollout == "bf16"
        engine = EmbeddedEngine(
            inputs.model_dir,
            sampling=inputs.sampling,
            seed=inputs.seed,
            batch_size=inputs.batch_size,
            dtype=torch.bfloat16 if is_bf16 else torch.float32,
            device=self.device,
            eos_token_ids=inputs.architecture.eos_token_ids,
            numerics=ServedNumerics.of(precision.section),
            fp8_weights=frozenset(name for row in inputs.rows if row.fp8 for name in row.hf),
        )
        engine.update_weights(inputs.weights.items(), version=0)
        return engine

    def place(self, generation: Generation) -> int:
        """Which of the prompts it answers."""
        return self._places[generation.prompt_id]

    def exact(self, generations: Sequence[Generation]) -> list[Tensor]:
        """Exact log-probs of the responses."""
        return self.scorer.score(self.sequences(generations))

    def sequences(
        self, generations: Sequence[Generation]
    ) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        prompts = self.inputs.prompts
        return [(prompts[self.place(g)].token_ids, g.response_ids) for g in generations]


def measure(
    inputs: ProbeInputs,
    precisions: Sequence[ServingPrecision],
    *,
    samples_per_prompt: int,
    ablate: Sequence[str] = (),
    ablate_precision: ServingPrecision,
    progress: Progress = lambda what: None,
) -> ProbeResult:
    """Measure each precision, then the parts of one.

    Args:
        inputs: model, prompts and sampling.
        precisions: to compare.
        samples_per_prompt: of each precision.
        ablate: any of `parts` and `layers`.
        ablate_precision: whose parts.
        progress: told what begins.

    Raises:
        NonFiniteError: log-probs are NaN, or a ratio is not finite.
        RewardError: too many rewards failed.
    """
    bench = Bench(inputs, samples_per_prompt, progress)
    results = [_measure_precision(bench, precision) for precision in precisions]
    ablation = _ablate(bench, ablate_precision, ablate) if ablate else None
    return ProbeResult(
        inputs=inputs,
        samples_per_prompt=samples_per_prompt,
        device=bench.device.type,
        precisions=results,
        ablation=ablation,
    )


def _measure_precision(bench: Bench, precision: ServingPrecision) -> PrecisionResult:
    generations = bench.samples(precision)
    prompts = [bench.place(generation) for generation in generations]
    log_ratios = [
        exact - torch.tensor(generation.logprobs, dtype=torch.float64)
        for exact, generation in zip(bench.exact(generations), generations, strict=True)
    ]
    metrics = mismatch_metrics(log_ratios, prompts) | {
        "response/length_mean": Measured(
            statistics.fmean(len(generation.response_ids) for generation in generations)
        ),
        "response/truncated_fraction": Measured(
            statistics.fmean(generation.finish_reason == "length" for generation in generations)
        ),
    }
    if (reward := _reward(bench, generations)) is not None:
        metrics["reward/mean"] = reward
    return PrecisionResult(
        precision=precision, metrics=metrics, positions=by_position(log_ratios, prompts)
    )


def _reward(bench: Bench, generations: Sequence[Generation]) -> Measured | None:
    """Mean over the samples whose reward could be computed; None without a verifier or reward."""
    section = bench.inputs.reward
    if section is None:
        return None
    texts = bench.inputs.tokenizer.batch_decode(
        [list(generation.response_ids) for generation in generations], skip_special_tokens=True
    )
    items = [bench.inputs.prompts[bench.place(generation)].item for generation in generations]
    with RewardRunner(section) as runner:
        rewards = runner.score(
            [
                RewardRequest(item.prompt, text, item.answer)
                for item, text in zip(items, texts, strict=True)
            ]
        )
    errors = [reward.error for reward in rewards if reward.value is None]
    check_failures(len(errors), len(rewards), section, errors[0] if errors else None)
    kept = [
        (reward.value, bench.place(generation))
        for reward, generation in zip(rewards, generations, strict=True)
        if reward.value is not None
    ]
    if not kept:
        return None
    values, prompts = zip(*kept, strict=True)
    return mean_by_prompt(torch.tensor(values, dtype=torch.float64), torch.tensor(prompts))


def _ablate(bench: Bench, precision: ServingPrecision, kinds: Sequence[str]) -> AblationResult:
    generations = bench.samples(_EXACT)
    sequences, exact = bench.sequences(generations), bench.exact(generations)
    prompts = [bench.place(generation) for generation in generations]
    numerics = ablation_numerics(precision.section)
    rows = ablations(bench.inputs.rows, precision.section, kinds)
    by_parts: dict[RoundedParts, Mapping[str, Measured]] = {}
    for number, row in enumerate(rows):
        if row.parts in by_parts:
            continue
        bench.progress(f"ablation {number + 1}/{len(rows)}: {row.name}")
        rounded = bench.scorer.score(sequences, numerics, row.parts)
        log_ratios = [one - other for one, other in zip(exact, rounded, strict=True)]
        by_parts[row.parts] = mismatch_metrics(log_ratios, prompts)
    whole = by_parts[rows[0].parts]["mismatch/k3"].value
    found = [
        AblationRow(
            ablation=row,
            metrics=by_parts[row.parts],
            share=by_parts[row.parts]["mismatch/k3"].value / whole if whole else None,
        )
        for row in rows
    ]
    found.sort(key=lambda row: -row.metrics["mismatch/k3"].value)
    return AblationResult(precision=precision, rows=found)
