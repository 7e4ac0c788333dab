"""One rank of a training run: inputs checked, parts built, loop run, results drawn."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from transformers import AutoTokenizer

from megatron_p3o.config import RunConfig, to_yaml
from megatron_p3o.errors import InputError
from megatron_p3o.parallel.checkpoint import CheckpointStore
from megatron_p3o.parallel.layout import ParallelLayout
from megatron_p3o.parallel.setup import ParallelContext, initialize, shut_down
from megatron_p3o.preflight import RunInputs, check_run
from megatron_p3o.rollout import EmbeddedEngine, ReplayRollouts, RolloutEngine, SampleRecorder
from megatron_p3o.run_dir import RunDir, replace_text
from megatron_p3o.trainer.ahead import AheadRollouts
from megatron_p3o.trainer.answers import answer_engine
from megatron_p3o.trainer.display import ConsoleDisplay, SilentDisplay, log_lines
from megatron_p3o.trainer.evaluate import make_evaluator
from megatron_p3o.trainer.experience import GeneratedRollouts, RecordedRollouts, RolloutSource
from megatron_p3o.trainer.loop import Observers, train
from megatron_p3o.trainer.policy import Policy
from megatron_p3o.trainer.report import report
from megatron_p3o.trainer.served_model import embedded_engine
from megatron_p3o.trainer.serving import cluster_rollouts
from megatron_p3o.trainer.sinks import open_sinks


def run_rank(config: RunConfig, *, resume: bool) -> None:
    """Train as the rank that the environment (RANK, WORLD_SIZE, ...) names.

    Raises:
        UserError: bad configuration or input; nothing has been written.
        RunError: the run cannot go on; the last checkpoint is valid.
    """
    _set_threads(config)
    layout = ParallelLayout.for_world(config.layout, int(os.environ["WORLD_SIZE"]))
    inputs = check_run(config, resume=resume)
    run_dir = RunDir(Path(config.run.dir))
    with _joined(layout, config) as context, ExitStack() as cleanup:
        if context.rank == 0:
            cleanup.enter_context(log_lines())
        embedded = None
        if config.rollout.engine == "embedded":
            embedded = embedded_engine(config, inputs.architecture, context.device)
        rollouts = _rollout_source(config, inputs, context, run_dir, embedded)
        cleanup.callback(rollouts.close)
        evaluator = make_evaluator(config, inputs, context, embedded)
        if evaluator is not None:
            cleanup.callback(evaluator.close)
        policy = Policy(config, inputs.architecture, context, inputs.reference_architecture)
        checkpoints = CheckpointStore(run_dir, context, keep=config.checkpoint.keep)
        first_step = 0
        if inputs.resume_from is not None:
            first_step = _restore(policy, rollouts, checkpoints)
        # Every rank has checked the run dir by now; only then may it come into being.
        context.barrier()
        observers = _observers(config, run_dir, context, first_step)
        cleanup.callback(observers.display.close)
        for sink in observers.sinks:
            cleanup.callback(sink.close)
        train(
            config,
            policy,
            rollouts,
            checkpoints,
            observers,
            evaluator=evaluator,
            identity=inputs.identity,
            first_step=first_step,
        )
        observers.display.close()
        if context.rank == 0:
            report(config)


@contextmanager
def _joined(layout: ParallelLayout, config: RunConfig) -> Iterator[ParallelContext]:
    context = initialize(layout, seed=config.run.seed)
    yield context
    # Not in a finally block: after a failure the other ranks may never come here.
    shut_down()


def _set_threads(config: RunConfig) -> None:
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    share = max(1, (os.cpu_count() or 1) // local_ranks)
    torch.set_num_threads(config.run.num_threads_per_rank or share)


def _rollout_source(
    config: RunConfig,
    inputs: RunInputs,
    context: ParallelContext,
    run_dir: RunDir,
    embedded: EmbeddedEngine | None,
) -> RolloutSource:
    if inputs.prompts is None:
        budget, multiple = config.train.max_tokens_per_microbatch, config.sequence_multiple
        return RecordedRollouts(
            ReplayRollouts(
                Path(str(config.rollout.replay_path)),
                # Padding counts, so only whole multiples can be filled.
                max_sequence_tokens=None if budget is None else budget // multiple * multiple,
                replayed_moe=inputs.architecture.moe if config.model.router_replay else None,
            )
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    except (OSError, ValueError) as error:
        raise InputError(
            f"model.path={config.model.path!r} has no tokenizer that can be read ({error}); copy "
            "the model's tokenizer files into it"
        ) from error
    if config.rollout.engine == "sglang":
        return cluster_rollouts(config, inputs, context, run_dir, tokenizer)
    engine: RolloutEngine = embedded or answer_engine(config, inputs, tokenizer)
    rollouts = GeneratedRollouts(
        config, context, engine=engine, prompts=inputs.prompts, tokenizer=tokenizer
    )
    ahead = config.rollout.max_staleness
    return AheadRollouts(rollouts, ahead=ahead, num_steps=config.train.steps) if ahead else rollouts


def _restore(policy: Policy, rollouts: RolloutSource, checkpoints: CheckpointStore) -> int:
    state = checkpoints.load_latest(policy.model, policy.optimizer)
    policy.weight_version = state["weight_version"]
    rollouts.load_state(state["rollouts"])
    return state["step"]


def _observers(
    config: RunConfig, run_dir: RunDir, context: ParallelContext, first_step: int
) -> Observers:
    if context.rank != 0:
        return Observers(sinks=(), recorder=None, display=SilentDisplay())
    run_dir.root.mkdir(parents=True, exist_ok=True)
    replace_text(run_dir.config, to_yaml(config))
    for notice in config.notices():
        print(f"warning: {notice}")
    if config.precision.trainer_is_fp8 and context.device.type == "cpu":
        print(
            f"warning: precision.trainer={config.precision.trainer} is emulated on a CPU: rounded "
            "numbers, multiplied in fp32; speed and memory say nothing about FP8"
        )
    recorder = None
    if config.run.record:
        recorder = SampleRecorder(run_dir.samples, first_step=first_step)
    return Observers(
        sinks=open_sinks(config, run_dir, first_step=first_step),
        recorder=recorder,
        display=ConsoleDisplay(config, first_step=first_step),
    )
