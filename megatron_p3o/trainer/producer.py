"""Rollout batches on servers, ahead of training: prompts in, rewarded groups out.

One task per step draws the step's prompts, generates all samples at once, rewards each group as
soon as it is complete, and with dynamic sampling replaces flat groups. Rank 0 alone runs it, on
the loop of its servers.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from megatron_p3o.config import RewardSection, RunConfig
from megatron_p3o.data import (
    DrawnPrompt,
    PromptCursor,
    PromptEncoder,
    PromptSet,
    RewardRequest,
    RewardResult,
    RewardRunner,
)
from megatron_p3o.rollout import Generation, StalenessBuffer
from megatron_p3o.trainer.experience import (
    Collected,
    check_rewards,
    is_flat,
    make_sample,
    replacement_metrics,
)
from megatron_p3o.types import FinishReason, RoutedExperts, SampleGroup, VersionSpan

T = TypeVar("T")


class SampledResponse(Protocol):
    """What the producer reads of `rollout.sglang.Response`."""

    token_ids: list[int]
    logprobs: list[float]
    version_spans: list[VersionSpan]
    finish_reason: FinishReason
    routed_experts: RoutedExperts | None


class MakesSamples(Protocol):
    """What the producer needs of `rollout.sglang.Sampler`."""

    async def sample(
        self, name: str, prompt_ids: Sequence[int], max_new_tokens: int
    ) -> SampledResponse: ...


class RewardPool:
    """Reward processes that work side by side; use from one event loop."""

    def __init__(self, config: RewardSection) -> None:
        self._runners = [RewardRunner(config) for _ in range(config.num_workers)]
        self._threads = ThreadPoolExecutor(config.num_workers, thread_name_prefix="reward")
        self._free: asyncio.Queue[RewardRunner] = asyncio.Queue()
        for runner in self._runners:
            self._free.put_nowait(runner)

    async def score(self, items: Sequence[RewardRequest]) -> list[RewardResult]:
        """One result per item, in order; see `RewardRunner.score`."""
        runner = await self._free.get()
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, runner.score, items)
        finally:
            self._free.put_nowait(runner)

    def close(self) -> None:
        """End the processes, also those that are at work."""
        for runner in self._runners:
            runner.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Batch:
    """One step in the making."""

    def __init__(self, step: int, known_draws: Sequence[DrawnPrompt]) -> None:
        self.step = step
        self.draws: list[DrawnPrompt] = []
        """All so far, replacements included; what a checkpoint keeps."""
        self.backlog = list(known_draws)
        """Draws of the interrupted run, to be used before the cursor's."""
        self.task: asyncio.Task[None] | None = None
        self.metrics: dict[str, float] = {}
        self.num_stale = 0


class BatchProducer:
    """Makes batches for steps in order. Every method but `state` belongs to the loop."""

    def __init__(
        self,
        config: RunConfig,
        sampler: MakesSamples,
        *,
        prompts: PromptSet,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._config = config
        self._sampler = sampler
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer, config.data)
        self._cursor = PromptCursor(len(prompts), config.run.seed, config.data.shuffle)
        self._rewards = RewardPool(config.data.reward)
        steps = config.train.optimizer_steps_per_rollout
        self._buffer = StalenessBuffer(max_lag=config.rollout.max_staleness * steps)
        self._batches: dict[int, _Batch] = {}
        self._known_draws: dict[int, list[DrawnPrompt]] = {}

    def start_up_to(self, step: int) -> None:
        """Begin the batches of this step and of those that may be ahead of it."""
        last = min(step + self._config.rollout.max_staleness, self._config.train.steps - 1)
        for ahead in range(step, last + 1):
            if ahead not in self._batches:
                batch = _Batch(ahead, self._known_draws.pop(ahead, ()))
                self._batches[ahead] = batch
                draws = self._draw(batch, self._config.train.prompts_per_step)
                batch.task = asyncio.create_task(self._produce(batch, draws))

    async def take(self, step: int, weight_version: int) -> Collected:
        """The step's batch, when it is complete.

        Args:
            step: begun by `start_up_to`.
            weight_version: of the trainer, which it must not lag by more than allowed.

        Raises:
            RunError: a sample or too many rewards failed.
        """
        batch = self._batches[step]
        assert batch.task is not None
        await batch.task
        while True:
            taken = self._buffer.take(step, weight_version)
            if not taken.stale:
                break
            batch.num_stale += sum(len(group.samples) for group in taken.stale)
            self._buffer.put(step, taken.fresh)
            again = {group.prompt_id for group in taken.stale}
            draws = {draw.key: draw for draw in batch.draws if draw.key in again}
            self._buffer.put(step, await self._groups(list(draws.values())))
        del self._batches[step]
        place = {draw.key: index for index, draw in enumerate(batch.draws)}
        return Collected(
            groups=tuple(sorted(taken.fresh, key=lambda group: place[group.prompt_id])),
            metrics={**batch.metrics, "rollout/stale_refused": float(batch.num_stale)},
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint after the last taken step keeps, JSON-ready: batches that are being
        made are made again, of the same prompts."""
        state = self._cursor.state()
        draws = {
            **self._known_draws,
            **{batch.step: batch.draws + batch.backlog for batch in self._batches.values()},
        }
        in_flight = {str(step): [[d.index, d.epoch] for d in draws[step]] for step in draws}
        return {**state, "in_flight": in_flight} if in_flight else state

    def load_state(self, state: dict[str, Any]) -> None:
        """Before the first batch is begun."""
        cursor = {name: value for name, value in state.items() if name != "in_flight"}
        self._cursor.load_state(cursor)
        self._known_draws = {
            int(step): [DrawnPrompt(*draw) for draw in draws]
            for step, draws in state.get("in_flight", {}).items()
        }

    def parity_prompts(self, count: int) -> list[tuple[int, ...]]:
        """Token ids of the first prompts, without drawing them."""
        return [
            self._encoder.encode(self._prompts[index % len(self._prompts)])
            for index in range(count)
        ]

    def close(self) -> None:
        for batch in self._batches.values():
            if batch.task is not None:
                batch.task.cancel()
        self._rewards.close()

    async def _produce(self, batch: _Batch, draws: list[DrawnPrompt]) -> None:
        """Consumes prompts; waits for servers and rewards; produces the step's groups in the
        buffer. Ends with its batch, or with the first error of any of its samples."""
        max_rounds = self._config.train.dynamic_sampling.max_rounds
        groups = await self._groups(draws)
        generated = [*groups]
        check_rewards(generated, self._config.data.reward)
        rounds = 0
        while rounds < max_rounds and (flat := [i for i, g in enumerate(groups) if is_flat(g)]):
            rounds += 1
            fresh = await self._groups(self._draw(batch, len(flat)))
            generated += fresh
            check_rewards(generated, self._config.data.reward)
            for place, group in zip(flat, fresh, strict=True):
                groups[place] = group
        if max_rounds:
            batch.metrics = replacement_metrics(generated, groups, rounds)
        self._buffer.put(batch.step, groups)

    def _draw(self, batch: _Batch, count: int) -> list[DrawnPrompt]:
        known, batch.backlog = batch.backlog[:count], batch.backlog[count:]
        draws = known + self._cursor.take(count - len(known))
        batch.draws += draws
        return draws

    async def _groups(self, draws: Sequence[DrawnPrompt]) -> list[SampleGroup]:
        return await _all([self._group(draw) for draw in draws])

    async def _group(self, draw: DrawnPrompt) -> SampleGroup:
        """All samples of one prompt, rewarded."""
        item = self._prompts[draw.index]
        prompt_ids = self._encoder.encode(item)
        max_new_tokens = self._config.sampling.max_new_tokens
        responses = await _all(
            [
                self._sampler.sample(f"{draw.key}/{index}", prompt_ids, max_new_tokens)
                for index in range(self._config.train.samples_per_prompt)
            ]
        )
        texts = self._tokenizer.batch_decode(
            [response.token_ids for response in responses], skip_special_tokens=True
        )
        rewards = await self._rewards.score(
            [RewardRequest(item.prompt, text, item.answer) for text in texts]
        )
        samples = [
            make_sample(
                Generation(
                    prompt_id=draw.key,
                    sample_index=index,
                    response_ids=tuple(response.token_ids),
                    logprobs=tuple(response.logprobs),
                    finish_reason=response.finish_reason,
                    version_spans=tuple(response.version_spans),
                    routed_experts=response.routed_experts,
                ),
                prompt_ids,
                item.prompt,
                text,
            ).with_reward(reward.value, reward.error)
            for index, (response, text, reward) in enumerate(
                zip(responses, texts, rewards, strict=True)
            )
        ]
        return SampleGroup(prompt_id=draw.key, samples=tuple(samples))


async def _all(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results in order; the first error ends the others and is raised as it is."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
