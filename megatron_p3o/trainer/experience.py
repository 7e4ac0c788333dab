"""From prompts to rewarded groups of samples, and from those to what one optimizer step consumes.

Every rank generates and rewards its share of the prompts, whatever its place in the model-parallel
layout; then all ranks hold all groups. Sampling noise depends only on (seed, step, prompt, sample,
position), so the sharing does not change the samples.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_p3o.algorithms import group_advantages, overlong_penalty, token_weights
from megatron_p3o.config import DAPOObjective, RewardSection, RunConfig
from megatron_p3o.data import (
    DrawnPrompt,
    PromptCursor,
    PromptEncoder,
    PromptSet,
    RewardRequest,
    RewardRunner,
    check_failures,
)
from megatron_p3o.parallel.setup import ParallelContext
from megatron_p3o.rollout import Generation, GenerationRequest, ReplayRollouts, RolloutEngine
from megatron_p3o.types import Sample, SampleGroup, ScoredSample


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """A step's groups, rewarded, the same on every rank."""

    groups: tuple[SampleGroup, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the groups alone do not tell: which were drawn and dropped."""


Weights = Callable[[], Iterable[tuple[str, Tensor]]]
"""Walks through a whole model by Hugging Face name. Collective, each time it is called."""


class RolloutSource(Protocol):
    """Where a step's groups come from."""

    def collect(self, step: int) -> Collected:
        """All groups of the step. Collective."""
        ...

    def publish(self, weights: Weights, version: int) -> None:
        """Take the trainer's weights, which stay as they are until `collect` has returned.
        Collective."""
        ...

    def parity_samples(self) -> Mapping[str, Sequence[Sample]]:
        """Samples under the weights published last, by the name of who made them, for a
        comparison of log-probs; none where there is nothing to compare. Collective."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, JSON-ready."""
        ...

    def load_state(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class GeneratedRollouts:
    """Samples from a rollout engine, rewarded by a verifier."""

    def __init__(
        self,
        config: RunConfig,
        context: ParallelContext,
        *,
        engine: RolloutEngine,
        prompts: PromptSet,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._config = config
        self._context = context
        self._engine = engine
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer, config.data)
        self._cursor = PromptCursor(len(prompts), config.run.seed, config.data.shuffle)
        self._rewards = RewardRunner(config.data.reward)
        check_prompts(prompts, tokenizer, config, context)

    def collect(self, step: int) -> Collected:
        """Draw, generate, reward; with dynamic sampling, replace groups of equal rewards.

        Which groups are replaced follows from the rewards, which all ranks hold, so all draw the
        same prompts. The draws are the cursor's next ones: a resumed run goes on after them.

        Raises:
            RewardError: on every rank, when more rewards fail than are tolerated.
        """
        max_rounds = self._config.train.dynamic_sampling.max_rounds
        groups = self._generate(self._cursor.take(self._config.train.prompts_per_step), step)
        generated = [*groups]
        check_rewards(generated, self._config.data.reward)
        rounds = 0
        while rounds < max_rounds and (flat := [i for i, g in enumerate(groups) if is_flat(g)]):
            rounds += 1
            fresh = self._generate(self._cursor.take(len(flat)), step)
            generated += fresh
            check_rewards(generated, self._config.data.reward)
            for place, group in zip(flat, fresh, strict=True):
                groups[place] = group
        metrics = replacement_metrics(generated, groups, rounds) if max_rounds else {}
        return Collected(groups=tuple(groups), metrics=metrics)

    def _generate(self, drawn: Sequence[DrawnPrompt], step: int) -> list[SampleGroup]:
        """Rewarded groups of the drawn prompts, in their order, on every rank. Collective."""
        mine = drawn[self._context.rank :: self._context.layout.world_size]
        requests = [
            GenerationRequest(
                prompt_id=prompt.key,
                prompt_ids=self._encoder.encode(self._prompts[prompt.index]),
                num_samples=self._config.train.samples_per_prompt,
                step=step,
            )
            for prompt in mine
        ]
        items = {prompt.key: self._prompts[prompt.index] for prompt in mine}
        generations = self._engine.generate(requests) if requests else []
        texts = self._tokenizer.batch_decode(
            [list(g.response_ids) for g in generations], skip_special_tokens=True
        )
        rewards = self._rewards.score(
            [
                RewardRequest(items[g.prompt_id].prompt, text, items[g.prompt_id].answer)
                for g, text in zip(generations, texts, strict=True)
            ]
        )
        prompt_ids = {request.prompt_id: request.prompt_ids for request in requests}
        samples = [
            make_sample(g, prompt_ids[g.prompt_id], items[g.prompt_id].prompt, text).with_reward(
                result.value, result.error
            )
            for g, text, result in zip(generations, texts, rewards, strict=True)
        ]
        everyone = [s for share in self._context.gather_objects(samples) for s in share]
        return _group([prompt.key for prompt in drawn], everyone)

    def publish(self, weights: Weights, version: int) -> None:
        self._engine.update_weights(weights(), version)

    def parity_samples(self) -> Mapping[str, Sequence[Sample]]:
        return {}

    def state(self) -> dict[str, Any]:
        return self._cursor.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self._cursor.load_state(state)

    def close(self) -> None:
        self._rewards.close()
        self._engine.close()


class RecordedRollouts:
    """Samples and rewards of a recorded run, step by step; weights are not needed."""

    def __init__(self, recording: ReplayRollouts) -> None:
        self._recording = recording

    def collect(self, step: int) -> Collected:
        return Collected(groups=self._recording.groups(step))

    def publish(self, weights: Weights, version: int) -> None:
        pass

    def parity_samples(self) -> Mapping[str, Sequence[Sample]]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


def score_groups(groups: Sequence[SampleGroup], config: RunConfig) -> list[ScoredSample]:
    """Advantages and token weights of the groups that one optimizer step consumes.

    Samples without a reward are left out.
    """
    objective = config.objective
    scored = []
    for group in groups:
        rewards = [
            None if sample.reward is None else sample.reward + _overlong_penalty(sample, config)
            for sample in group.samples
        ]
        advantages = group_advantages(rewards, objective.advantage)
        scored += [
            (sample, advantage)
            for sample, advantage in zip(group.samples, advantages, strict=True)
            if advantage is not None
        ]
    weights = token_weights(
        [sample.num_response_tokens for sample, _ in scored],
        objective.normalization,
        constant_length=objective.normalization_length or config.sampling.max_new_tokens,
    )
    return [
        ScoredSample(sample=sample, advantage=advantage, token_weight=weight)
        for (sample, advantage), weight in zip(scored, weights, strict=True)
    ]


def split_groups(groups: Sequence[SampleGroup], parts: int) -> list[Sequence[SampleGroup]]:
    """Whole groups, shared over a rollout batch's optimizer steps in order."""
    size = -(-len(groups) // parts)
    return [groups[start : start + size] for start in range(0, len(groups), size)]


def check_prompts(
    prompts: PromptSet,
    tokenizer: PreTrainedTokenizerBase,
    config: RunConfig,
    context: ParallelContext,
) -> None:
    """Encode every prompt once, shared over ranks: a bad one must not stop the run at step 900.

    Raises:
        InputError: on the rank that met it.
    """
    encoder = PromptEncoder(tokenizer, config.data)
    for item in prompts[context.rank :: context.layout.world_size]:
        encoder.encode(item)


def check_rewards(groups: Sequence[SampleGroup], config: RewardSection) -> None:
    """Raises RewardError when more rewards failed than are tolerated."""
    samples = [sample for group in groups for sample in group.samples]
    failed = [sample for sample in samples if sample.reward is None]
    check_failures(
        len(failed),
        len(samples),
        config,
        f"sample {failed[0].name}: {failed[0].reward_error}" if failed else None,
    )


def is_flat(group: SampleGroup) -> bool:
    """Whether the rewards that are there are all equal, so that every advantage is 0."""
    return len({s.reward for s in group.samples if s.reward is not None}) <= 1


def batch_metrics(
    groups: Sequence[SampleGroup],
    advantages: Sequence[float],
    weight_version: int,
    config: RunConfig,
) -> dict[str, float]:
    """What the samples alone say of a rollout batch."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    lengths = [sample.num_response_tokens for sample in samples]
    lags = [weight_version - sample.weight_version_min for sample in samples]
    penalties = {}
    if isinstance(config.objective, DAPOObjective):
        values = [_overlong_penalty(sample, config) for sample in samples]
        penalties = {"reward/overlong_penalty_mean": statistics.fmean(values)}
    return {
        **penalties,
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/failed_fraction": 1 - len(rewards) / len(samples),
        "response/length_mean": statistics.fmean(lengths),
        "response/truncated_fraction": statistics.fmean(
            sample.finish_reason == "length" for sample in samples
        ),
        "advantage/zero_variance_fraction": sum(map(is_flat, groups)) / len(groups),
        "advantage/abs_mean": statistics.fmean(map(abs, advantages)),
        "staleness/mean": statistics.fmean(lags),
        "staleness/max": float(max(lags)),
        "tokens/response": float(sum(lengths)),
    }


def make_sample(
    generation: Generation, prompt_ids: tuple[int, ...], prompt: str, text: str
) -> Sample:
    """A generation with its prompt and text, not yet rewarded."""
    versions = {span.version for span in generation.version_spans}
    return Sample(
        prompt_id=generation.prompt_id,
        sample_index=generation.sample_index,
        prompt_ids=prompt_ids,
        response_ids=generation.response_ids,
        rollout_logprobs=generation.logprobs,
        finish_reason=generation.finish_reason,
        weight_version_min=min(versions),
        weight_version_max=max(versions),
        version_spans=generation.version_spans if len(versions) > 1 else (),
        prompt_text=prompt,
        response_text=text,
        routed_experts=generation.routed_experts,
    )


def _overlong_penalty(sample: Sample, config: RunConfig) -> float:
    """What DAPO adds to the reward; 0 for the other objectives."""
    if not isinstance(config.objective, DAPOObjective):
        return 0.0
    max_length = config.sampling.max_new_tokens
    return overlong_penalty(
        sample.num_response_tokens,
        max_length=max_length,
        buffer=config.objective.overlong_buffer_fraction * max_length,
    )


def replacement_metrics(
    generated: Sequence[SampleGroup], kept: Sequence[SampleGroup], rounds: int
) -> dict[str, float]:
    """What dynamic sampling did; `generated` holds the kept groups too."""
    kept_ids = {group.prompt_id for group in kept}
    dropped = [group for group in generated if group.prompt_id not in kept_ids]
    rewards = [s.reward for group in dropped for s in group.samples if s.reward is not None]
    return {
        "dynamic_sampling/rounds": float(rounds),
        "dynamic_sampling/dropped_groups": float(len(dropped)),
        "dynamic_sampling/dropped_fraction": len(dropped) / len(generated),
        "dynamic_sampling/dropped_tokens": float(
            sum(s.num_response_tokens for group in dropped for s in group.samples)
        ),
        # Says whether prompts were too hard or too easy; 0 where nothing was dropped.
        "dynamic_sampling/dropped_reward_mean": statistics.fmean(rewards) if rewards else 0.0,
    }


def _group(order: Sequence[str], samples: Sequence[Sample]) -> list[SampleGroup]:
    by_prompt: dict[str, list[Sample]] = {prompt_id: [] for prompt_id in order}
    for sample in samples:
        by_prompt[sample.prompt_id].append(sample)
    return [
        SampleGroup(
            prompt_id=prompt_id, samples=tuple(sorted(members, key=lambda s: s.sample_index))
        )
        for prompt_id, members in by_prompt.items()
    ]
