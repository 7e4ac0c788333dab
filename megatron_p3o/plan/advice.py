"""What a plan warns of: what does not fit, and what wastes; each with what to change."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_p3o.architecture import ModelArchitecture
from megatron_p3o.config import RunConfig
from megatron_p3o.parallel.layout import ParallelLayout
from megatron_p3o.plan.batch import step_batch
from megatron_p3o.plan.hardware import Gpu
from megatron_p3o.plan.memory import StageMemory
from megatron_p3o.plan.options import PlanOptions, longest_lengths
from megatron_p3o.plan.serving import Servers
from megatron_p3o.plan.timing import StepCost

_MAX_BUBBLE = 0.15
_MIN_TOKENS_PER_EXPERT = 128  # fewer rows than the tile of a matrix product
_MAX_IMBALANCE = 1.5
_CURES = {
    "weights": "raise layout.tensor or layout.pipeline (layout.expert for experts)",
    "gradients": "raise layout.tensor or layout.pipeline (layout.expert for experts)",
    "optimizer": "use optimizer.distributed=true on more data-parallel ranks",
    "reference model": "set reference.kl_coefficient=0, or raise layout.tensor or layout.pipeline",
    "rollout model": "use rollout.engine=sglang, whose servers have GPUs of their own",
    "recomputed layer": "raise layout.context or layout.tensor with sequence_parallel",
    "temporaries": "raise layout.context or layout.tensor with sequence_parallel",
    "hidden states": "raise layout.context, or lower train.max_tokens_per_microbatch",
    "output weight's gradient": "raise layout.tensor, which shares the vocabulary",
    "log-prob chunk": "lower train.logprob_chunk_tokens",
    "KV cache": "lower rollout.batch_size",
    "copy of the KV cache": "lower rollout.batch_size",
    "sampling": "lower rollout.batch_size",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """All that warnings look at."""

    config: RunConfig
    architecture: ModelArchitecture
    layout: ParallelLayout
    options: PlanOptions
    gpu: Gpu
    memory_bytes: float
    memory: StageMemory
    servers: Servers | None
    cost: StepCost


def warnings(situation: Situation) -> list[str]:
    """Sentences, most pressing first."""
    return [
        *_memory(situation),
        *_server_memory(situation),
        *_nodes(situation),
        *_batch(situation),
        *_experts(situation),
        *_precision(situation),
        *_waiting(situation),
    ]


def _memory(s: Situation) -> Iterator[str]:
    if s.memory.total <= s.memory_bytes:
        return
    parts = s.memory.resident | s.memory.phases[s.memory.peak_phase]
    largest = max(parts, key=lambda part: parts[part])
    yield (
        f"stage {s.memory.stage} needs {s.memory.total / 1e9:.1f} GB of {s.memory_bytes / 1e9:.0f} "
        f"GB; the largest part is {largest} ({parts[largest] / 1e9:.1f} GB): "
        f"{_CURES.get(largest) or _fewer_activations(s.config)}"
    )


def _fewer_activations(config: RunConfig) -> str:
    train = config.train
    budget = "max_tokens_per_microbatch" if train.packing else "microbatch_size"
    cures = [
        *(["use train.scoring=separate"] if train.scoring == "fused" else []),
        *(["set train.recompute=full"] if train.recompute != "full" else []),
        f"lower train.{budget}",
        "raise layout.context",
    ]
    return ", or ".join(cures)


def _server_memory(s: Situation) -> Iterator[str]:
    servers = s.servers
    if servers is None:
        return
    size = servers.gpus_each
    if servers.longest_sequences == 0:
        yield (
            f"a server's weights ({servers.weight_bytes / 1e9:.1f} GB on each of {size} GPUs) "
            "leave no room for one sequence of the greatest length; raise "
            "rollout.launch.tensor_parallel_size"
        )
    elif servers.longest_sequences < servers.concurrency:
        yield (
            f"rollout.concurrency={servers.concurrency}, but a server holds the KV cache of "
            f"{servers.longest_sequences} sequences of the greatest length, so it may retract some "
            "and compute them again; lower rollout.concurrency, raise "
            "rollout.launch.tensor_parallel_size, or use precision.rollout_kv_cache=fp8_e4m3"
        )
    if size > s.options.gpus_per_node:
        yield (
            f"rollout.launch.tensor_parallel_size={size} exceeds a node's "
            f"{s.options.gpus_per_node} GPUs, and p3o serve starts a server on one node; lower it"
        )


def _nodes(s: Situation) -> Iterator[str]:
    per_node, layout = s.options.gpus_per_node, s.layout
    if layout.world_size <= per_node:
        return
    if per_node % layout.tensor:
        yield (
            f"layout.tensor={layout.tensor} crosses nodes of {per_node} GPUs, and every layer "
            "waits for the network twice in each direction; use a divisor of "
            f"{per_node}, and layout.pipeline for the rest"
        )
    if per_node % (layout.expert * layout.expert_tensor):
        yield (
            f"layout.expert={layout.expert} x layout.expert_tensor={layout.expert_tensor} crosses "
            f"nodes of {per_node} GPUs, and tokens travel to experts by the network; lower it, or "
            "expect a smaller mfu"
        )


def _batch(s: Situation) -> Iterator[str]:
    train, data = s.config.train, s.layout.data
    batch = step_batch(s.config, longest_lengths(s.config), data)
    if batch.sequences % data:
        idle = 1 - batch.sequences / (batch.sequences_per_rank * data)
        yield (
            f"the {batch.sequences} sequences of an optimizer step cannot be shared evenly over "
            f"{data} data-parallel ranks, which are idle for {idle:.0%} of the time; make "
            "train.prompts_per_step x train.samples_per_prompt / "
            f"train.optimizer_steps_per_rollout a multiple of {data}"
        )
    times = s.cost.times
    if times.bubble > _MAX_BUBBLE:
        yield (
            f"{times.microbatches} microbatches on {s.layout.pipeline} pipeline stages leave a "
            f"bubble of {times.bubble:.0%}; make microbatches smaller "
            "(train.max_tokens_per_microbatch, train.microbatch_size), raise "
            "layout.virtual_pipeline, or lower layout.pipeline or the number of data-parallel ranks"
        )
    if data * s.layout.context > 1 and not s.config.optimizer.distributed:
        yield (
            "optimizer.distributed=false keeps the whole optimizer state on each of "
            f"{data * s.layout.context} ranks; set it to true"
        )
    if train.recompute == "selective" and s.config.precision.trainer != "fp32":
        yield (
            "train.recompute=selective computes attention again, whose scores flash attention does "
            "not keep anyway: it saves next to nothing; use none, or full if memory is short"
        )


def _experts(s: Situation) -> Iterator[str]:
    moe = s.architecture.moe
    if moe is None:
        return
    layout = s.layout
    batch = step_batch(s.config, longest_lengths(s.config), layout.data)
    ranks = layout.expert * layout.expert_tensor
    tokens = batch.microbatch_tokens / (layout.context * layout.tensor) * ranks
    per_expert = tokens * moe.experts_per_token / moe.num_experts
    if per_expert < _MIN_TOKENS_PER_EXPERT:
        yield (
            f"each expert gets about {per_expert:.0f} tokens of a microbatch, too few to fill a "
            "matrix product; raise train.max_tokens_per_microbatch or train.microbatch_size, or "
            "layout.expert"
        )
    if layout.expert == moe.num_experts > 1:
        yield (
            f"layout.expert={layout.expert} leaves one expert on a rank, so that ranks with a "
            "popular one keep the others waiting; lower layout.expert"
        )


def _precision(s: Situation) -> Iterator[str]:
    for field in ("trainer", "rollout"):
        value = getattr(s.config.precision, field)
        if value.startswith("fp8") and s.gpu.fp8_flops is None:
            yield (
                f"precision.{field}={value}, but --gpu={s.options.gpu} has no FP8; use bf16 or "
                "another GPU"
            )


def _waiting(s: Situation) -> Iterator[str]:
    times = s.cost.times
    if s.servers is None or not s.config.rollout.max_staleness:
        return
    training = times.score_s + times.train_s
    if times.rollout_s > _MAX_IMBALANCE * training:
        yield (
            f"rollouts take {times.rollout_s / training:.1f} times as long as training, so "
            "trainers wait; move nodes from trainers to servers"
        )
    elif training > _MAX_IMBALANCE * times.rollout_s:
        yield (
            f"training takes {training / times.rollout_s:.1f} times as long as rollouts, so "
            "servers wait; move nodes from servers to trainers"
        )
