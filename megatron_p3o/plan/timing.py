"""FLOPs and time of a step, from the work and a share of the peak.

    pass time = work of the busiest data-parallel rank's sequences
                / (ranks of one copy of the model x peak x mfu) / (1 - bubble)
    bubble    = (p - 1) / (m v + p - 1)     p stages, m microbatches, v chunks a stage
                (Narayanan et al., arXiv:2104.04473, section 2.2, as a share of the whole pass)

    synchronous    rollout + score + train + sync
    one step off   max(rollout, score + train) + sync: servers generate while the trainers train,
                   and wait while weights are sent
    run            initial sync + steps x step, and one more rollout when ahead

Communication within the passes is part of mfu. Not counted: rewards, checkpoints, start-up,
uneven lengths within a data-parallel rank, and experts that get more tokens than others.
"""

from dataclasses import dataclass

from megatron_p3o.architecture import ModelArchitecture
from megatron_p3o.config import RunConfig
from megatron_p3o.parallel.layout import ParallelLayout
from megatron_p3o.plan.batch import StepBatch, step_batch
from megatron_p3o.plan.flops import ForwardFlops, Work, score_passes, score_work, train_work
from megatron_p3o.plan.hardware import Gpu
from megatron_p3o.plan.options import PlanOptions
from megatron_p3o.plan.serving import RolloutTime, Servers, generators, rollout_time
from megatron_p3o.plan.sync import WeightSync


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFlops:
    """Of one rollout batch, on all GPUs together."""

    forward_per_token: float
    """Of one input token of the mean sequence, head included."""
    train: float
    score: float
    reference: float
    rollout: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Of one rollout batch with all its optimizer steps, seconds."""

    rollout_s: float
    score_s: float
    """The reference model's pass included."""
    train_s: float
    sync_s: float
    synchronous_s: float
    one_step_off_s: float | None
    """None without servers."""
    run_s: float
    """Of train.steps, in the mode that rollout.max_staleness asks for."""
    bubble: float
    microbatches: int
    """Of an optimizer step, on each data-parallel rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """What a step takes."""

    flops: StepFlops
    times: StepTimes
    rollout: RolloutTime | None
    """None when a recording is replayed."""


def plan_step(
    config: RunConfig,
    architecture: ModelArchitecture,
    reference: ModelArchitecture | None,
    layout: ParallelLayout,
    servers: Servers | None,
    sync: WeightSync,
    gpu: Gpu,
    options: PlanOptions,
) -> StepCost:
    lengths, train = options.expected(config), config.train
    flops = ForwardFlops.of(architecture)
    batch = step_batch(config, lengths, layout.data)
    size = config.layout.pipeline
    bubble = (size - 1) / (batch.microbatches * config.layout.virtual_pipeline + size - 1)
    samples = train.prompts_per_step * train.samples_per_prompt

    score = score_work(flops, lengths)
    passes = score_passes(train.optimizer_steps_per_rollout, is_fused=train.scoring == "fused")
    of_reference = Work()
    if reference is not None:
        of_reference = score_work(ForwardFlops.of(reference), lengths)
    training = train_work(flops, lengths, train.recompute)

    def pass_s(work: Work) -> float:
        sequences = batch.sequences_per_rank * train.optimizer_steps_per_rollout
        one = (work * sequences).seconds(gpu, config.precision.trainer)
        return one / (config.layout.model_parallel_size * options.mfu * (1 - bubble))

    rollout = None
    if config.rollout.engine != "replay":
        who = generators(config, architecture, servers, lengths, layout.world_size)
        rollout = rollout_time(config, architecture, who, lengths, gpu, options)
    return StepCost(
        flops=StepFlops(
            forward_per_token=score.total / lengths.inputs,
            train=training.total * samples,
            score=score.total * passes * samples,
            reference=of_reference.total * samples,
            rollout=0.0 if rollout is None else rollout.flops,
        ),
        times=_times(
            config,
            batch,
            bubble,
            rollout_s=0.0 if rollout is None else rollout.total_s,
            score_s=pass_s(score * passes + of_reference),
            train_s=pass_s(training),
            sync_s=sync.seconds,
        ),
        rollout=rollout,
    )


def _times(
    config: RunConfig,
    batch: StepBatch,
    bubble: float,
    *,
    rollout_s: float,
    score_s: float,
    train_s: float,
    sync_s: float,
) -> StepTimes:
    synchronous = rollout_s + score_s + train_s + sync_s
    one_step_off = None
    run = sync_s + config.train.steps * synchronous
    if config.rollout.engine == "sglang":
        one_step_off = max(rollout_s, score_s + train_s) + sync_s
        if config.rollout.max_staleness:
            run = sync_s + rollout_s + config.train.steps * one_step_off
    return StepTimes(
        rollout_s=rollout_s,
        score_s=score_s,
        train_s=train_s,
        sync_s=sync_s,
        synchronous_s=synchronous,
        one_step_off_s=one_step_off,
        run_s=run,
        bubble=bubble,
        microbatches=batch.microbatches,
    )
