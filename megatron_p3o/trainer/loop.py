"""The training loop: the algorithm box of P3O, one rollout batch a step.

collect samples from the behaviour policy b, reward them, take group advantages
score them under the present weights (no gradient)         -> proximal log-probs
for each optimizer step of the batch:
    ratios against b -> ESS sums -> one all-reduce          -> e
    forward and backward with cap e and KL weight 1 - e     -> optimizer step
publish the weights to the rollout engine, and evaluate them every so often
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_p3o.config import RunConfig
from megatron_p3o.parallel.batching import Microbatch
from megatron_p3o.parallel.checkpoint import CheckpointStore
from megatron_p3o.parallel.step import MicrobatchScore
from megatron_p3o.rollout import SampleRecorder
from megatron_p3o.trainer.display import Display, alarms
from megatron_p3o.trainer.evaluate import Evaluator
from megatron_p3o.trainer.experience import (
    RolloutSource,
    batch_metrics,
    score_groups,
    split_groups,
)
from megatron_p3o.trainer.metrics import Metric, MetricSink, combine
from megatron_p3o.trainer.parity import check_parity
from megatron_p3o.trainer.policy import Policy
from megatron_p3o.trainer.timing import StepTimer
from megatron_p3o.types import SampleGroup, ScoredSample


@dataclass(frozen=True, kw_only=True)
class Observers:
    """Who is told of each finished step; empty but for `display` on ranks other than 0."""

    sinks: Sequence[MetricSink]
    recorder: SampleRecorder | None
    display: Display


def train(
    config: RunConfig,
    policy: Policy,
    rollouts: RolloutSource,
    checkpoints: CheckpointStore,
    observers: Observers,
    *,
    identity: dict[str, Any],
    first_step: int,
    evaluator: Evaluator | None = None,
) -> None:
    """Run steps `first_step` to `train.steps`. Collective.

    Raises:
        RunError: the run cannot go on; the last checkpoint is valid.
    """
    rollouts.publish(policy.named_tensors, policy.weight_version)
    check_parity(config, policy, rollouts.parity_samples())
    for step in range(first_step, config.train.steps):
        timer = StepTimer()
        version = policy.weight_version
        with timer.phase("rollout"):
            collected = rollouts.collect(step)
        groups = collected.groups
        batches = [
            score_groups(part, config)
            for part in split_groups(groups, config.train.optimizer_steps_per_rollout)
        ]
        updates = _optimize(policy, batches, timer)
        with timer.phase("sync"):
            rollouts.publish(policy.named_tensors, policy.weight_version)
        evaluated: dict[str, float] = {}
        if evaluator is not None and _due(config.eval.every, config, step + 1):
            with timer.phase("eval"):
                evaluated = evaluator.metrics(policy.named_tensors, policy.weight_version)
        with timer.phase("checkpoint"):
            checkpoints.advance()
            if _due(config.checkpoint.every, config, step + 1):
                state = {
                    "step": step + 1,
                    "weight_version": policy.weight_version,
                    "rollouts": rollouts.state(),
                    "identity": identity,
                }
                checkpoints.begin(step + 1, policy.model, policy.optimizer, state)
        metrics = {
            "weight_version": version,
            **batch_metrics(groups, [s.advantage for b in batches for s in b], version, config),
            **collected.metrics,
            **combine(updates),
            **policy.precision_metrics(),
            **evaluated,
            **timer.metrics(),
        }
        _record(observers, config, step, groups, batches, metrics)
        if not config.checkpoint.asynchronous:
            checkpoints.complete()
    checkpoints.complete()


def _optimize(
    policy: Policy, batches: Sequence[Sequence[ScoredSample]], timer: StepTimer
) -> list[dict[str, Metric]]:
    """All optimizer steps of one rollout batch; metrics of each."""
    fused = policy.config.train.scoring == "fused"
    with timer.phase("score"):
        first, *later = [policy.with_reference(policy.microbatches(batch)) for batch in batches]
        # The weights that first consume the batch give every token its proximal log-prob; for the
        # first optimizer step those are the present weights, for later ones they are remembered.
        later = [_with_proximal(m, policy.score(m)) for m in later]
        # Last, since the router metrics of an update are those of the pass before it.
        first_scores = [] if fused else policy.score(first)
    updates = []
    for index, microbatches in enumerate([first, *later]):
        if fused:
            with timer.phase("train"):
                updates.append(policy.update_fused(microbatches))
            continue
        with timer.phase("score"):
            scores = first_scores if index == 0 else policy.score(microbatches)
            trust = policy.trust(microbatches, scores)
        with timer.phase("train"):
            updates.append(policy.update(microbatches, trust))
    return updates


def _with_proximal(
    microbatches: list[Microbatch], scores: list[MicrobatchScore]
) -> list[Microbatch]:
    if not scores:  # off the last pipeline stage nobody reads them
        return microbatches
    return [m.with_proximal(s.logprobs) for m, s in zip(microbatches, scores, strict=True)]


def _record(
    observers: Observers,
    config: RunConfig,
    step: int,
    groups: Sequence[SampleGroup],
    batches: Sequence[Sequence[ScoredSample]],
    metrics: dict[str, float],
) -> None:
    if observers.recorder is not None:
        advantages = {s.sample.name: s.advantage for batch in batches for s in batch}
        observers.recorder.write(
            step,
            [(s, advantages.get(s.name)) for group in groups for s in group.samples],
        )
    found = alarms(metrics, config)
    line: dict[str, float | str] = {**metrics}
    if found:
        line["alarm"] = "; ".join(found)
    for sink in observers.sinks:
        sink.write(step, line)
    observers.display.step(step, metrics)


def _due(every: int, config: RunConfig, finished: int) -> bool:
    """Whether it is time after this many steps; the last step always is, unless `every` is 0."""
    return every > 0 and (finished % every == 0 or finished == config.train.steps)
