"""Who generates: memory of a rollout server, and the time of a batch.

A server of G GPUs gives weights and KV cache a fraction f of its memory (SGLang's
--mem-fraction-static, 0.85 where rollout.launch.args has none):

    weights       served bytes / G
    KV a token    layers x 2 x max(1, key heads / G) x head channels x bytes, on each GPU;
                  with latent attention layers x (latent + position channels) x bytes, on every GPU
    sequences     floor((f x memory - weights) / (KV a token x longest sequence))

Time of a batch. n sequences a server, c of them at once (rollout.concurrency, if their KV caches
fit at mean length), R tokens each, behind P + R / 2 others in the mean:

    decode step   max of  bytes / (HBM x mbu)  and  FLOPs of c tokens / (peak x mfu)
                  bytes = matrices and output weight, once, and c KV caches. Of E experts the c
                  tokens meet 1 - (1 - k/E)^c
    rollout       n / c x R decode steps, and a prefill for each prompt; at least
                  sampling.max_new_tokens decode steps of one sequence, for the longest response

The embedded engine is taken as one server on every rank, by the same formulas.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_p3o.architecture import ModelArchitecture
from megatron_p3o.config import RunConfig
from megatron_p3o.plan.batch import Lengths
from megatron_p3o.plan.flops import ForwardFlops, Work
from megatron_p3o.plan.hardware import Gpu
from megatron_p3o.plan.options import PlanOptions, longest_lengths
from megatron_p3o.plan.parameters import Weight, embedding, model_weights
from megatron_p3o.plan.precision import Precision

_MEMORY_FRACTION = 0.85
_FRACTION_WORD = re.compile(r"--mem-fraction-static[= ](\d*\.?\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Servers:
    """Rollout servers, all alike; bytes are those of one GPU."""

    count: int
    gpus_each: int
    weight_bytes: float
    kv_bytes_per_token: float
    memory_fraction: float
    kv_tokens: int
    """That fit beside the weights."""
    longest_sequences: int
    """Of the greatest length, at once."""
    concurrency: int
    """Sequences that a server is given at once."""


def plan_servers(
    config: RunConfig, architecture: ModelArchitecture, options: PlanOptions, memory_bytes: float
) -> Servers | None:
    """None without SGLang servers."""
    rollout = config.rollout
    if rollout.engine != "sglang":
        return None
    precision, size = Precision.of(config.precision), rollout.launch.tensor_parallel_size
    weights = sum(map(precision.served_bytes, model_weights(architecture))) / size
    per_token = server_kv_bytes(architecture, precision, size)
    fraction = _memory_fraction(rollout.launch.args)
    room = max(0.0, fraction * memory_bytes - weights)
    longest = longest_lengths(config)
    return Servers(
        count=len(rollout.servers) or rollout.launch.replicas * options.server_nodes,
        gpus_each=size,
        weight_bytes=weights,
        kv_bytes_per_token=per_token,
        memory_fraction=fraction,
        kv_tokens=int(room // per_token),
        longest_sequences=int(room // (per_token * longest.inputs)),
        concurrency=rollout.concurrency,
    )


def server_kv_bytes(architecture: ModelArchitecture, precision: Precision, size: int) -> float:
    """Of one token on each of a server's GPUs."""
    a, mla = architecture, architecture.mla
    channels = 2 * max(1.0, a.num_key_value_heads / size) * a.head_dim
    if mla is not None:
        channels = mla.kv_lora_rank + mla.qk_rope_head_dim
    return a.num_layers * channels * precision.kv_bytes


def embedded_kv_bytes(architecture: ModelArchitecture, precision: Precision) -> float:
    """Of one token in transformers' cache, which holds latent attention's keys and values, not
    its latents."""
    a, mla = architecture, architecture.mla
    channels = 2 * a.num_key_value_heads * a.head_dim
    if mla is not None:
        head = mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim
        channels = a.num_attention_heads * head
    return a.num_layers * channels * precision.rollout_bytes


def _memory_fraction(args: Sequence[str]) -> float:
    found = _FRACTION_WORD.search(" ".join(args))
    return float(found[1]) if found else _MEMORY_FRACTION


@dataclass(frozen=True, kw_only=True, slots=True)
class Generators:
    """What generates, servers or ranks, for the cost of decoding."""

    count: int
    gpus_each: int
    concurrency: int
    kv_bytes_per_token: float
    """On each GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutTime:
    """Of one rollout batch."""

    concurrency: int
    """Sequences decoded at once by each server or rank."""
    decode_step_s: float
    is_memory_bound: bool
    decode_s: float
    prefill_s: float
    longest_s: float
    """Least time of the longest response."""
    flops: float
    """Of the whole batch."""

    @property
    def total_s(self) -> float:
        return max(self.decode_s + self.prefill_s, self.longest_s)


def generators(
    config: RunConfig,
    architecture: ModelArchitecture,
    servers: Servers | None,
    lengths: Lengths,
    world_size: int,
) -> Generators:
    if servers is None:
        return Generators(
            count=min(world_size, config.train.prompts_per_step),
            gpus_each=1,
            concurrency=config.rollout.batch_size,
            kv_bytes_per_token=embedded_kv_bytes(architecture, Precision.of(config.precision)),
        )
    fit = int(servers.kv_tokens / (lengths.prompt + lengths.response / 2))
    return Generators(
        count=servers.count,
        gpus_each=servers.gpus_each,
        concurrency=max(1, min(servers.concurrency, fit)),
        kv_bytes_per_token=servers.kv_bytes_per_token,
    )


def rollout_time(
    config: RunConfig,
    architecture: ModelArchitecture,
    who: Generators,
    lengths: Lengths,
    gpu: Gpu,
    options: PlanOptions,
) -> RolloutTime:
    """Time of one rollout batch of `lengths`."""
    precision, flops = Precision.of(config.precision), ForwardFlops.of(architecture)
    samples = config.train.prompts_per_step * config.train.samples_per_prompt
    per_server = -(-samples // who.count)
    concurrency = min(who.concurrency, per_server)
    context = lengths.prompt + lengths.response / 2

    def compute_s(work: Work) -> float:
        return work.seconds(gpu, precision.rollout) / (who.gpus_each * options.mfu)

    def step_s(sequences: int) -> tuple[float, float]:
        """(time of reading, time of computing)"""
        read = _bytes_read(architecture, precision, sequences) / who.gpus_each
        read += sequences * who.kv_bytes_per_token * context
        reading = read / (gpu.hbm_bytes_s * options.mbu)
        return reading, compute_s(flops.decode(context) * sequences)

    steps = per_server / concurrency * lengths.response
    prompts = -(-config.train.prompts_per_step // who.count)
    prefill = flops.layers(lengths.prompt)
    whole = prefill * config.train.prompts_per_step + flops.decode(context) * (
        samples * lengths.response
    )
    return RolloutTime(
        concurrency=concurrency,
        decode_step_s=max(step_s(concurrency)),
        is_memory_bound=step_s(concurrency)[0] >= step_s(concurrency)[1],
        decode_s=steps * max(step_s(concurrency)),
        prefill_s=compute_s(prefill * prompts),
        longest_s=config.sampling.max_new_tokens * max(step_s(1)),
        flops=whole.total,
    )


def _bytes_read(architecture: ModelArchitecture, precision: Precision, sequences: int) -> float:
    """Of the weights in one decode step, on all of a server's GPUs together."""
    moe = architecture.moe
    met = 1.0
    if moe is not None:
        met = 1 - (1 - moe.experts_per_token / moe.num_experts) ** sequences

    def read(weight: Weight) -> float:
        return precision.served_bytes(weight) * (met if weight.cut == "expert" else 1.0)

    whole = sum(map(read, model_weights(architecture)))
    # An embedding of its own is looked up, row by row.
    is_tied = architecture.tie_word_embeddings
    return whole - (0 if is_tied else precision.served_bytes(embedding(architecture)))
