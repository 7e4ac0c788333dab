"""Bytes on one trainer GPU, by part, on the pipeline stage that needs most.

    total = resident + the greatest of the phases' parts + allowance

Resident, for a rank's P parameters, P_e of them in experts:

    weights        P x 2 (bf16) or 4 (fp32); FP8 as in `megatron_p3o.plan.precision`
    gradients      P x 4: Megatron's buffer, reduced in fp32
    optimizer      12 a parameter (8 when weights are fp32), (P - P_e) / (data x context) and
                   P_e / copies of the experts with optimizer.distributed, else undivided
    reference      the frozen model's weights, with reference.kl_coefficient
    rollout model  the embedded engine's whole copy of the model

Phases, of which only one is in memory at a time:

    train      kept activations (`megatron_p3o.plan.activations`) of all microbatches in flight; the
               widest layer's temporaries; log-prob head: on the last stage
                 T H b         hidden states of the predicted tokens, for each microbatch in flight
                 2 T H b       their gradients, and those of all positions
                 V/t H b       the gradient of the output weight
                 8 c V/t       a chunk of c tokens: log-probs and their exponentials, in fp32;
                               16 c V/t where the entropy is taken (`parallel.logprobs`)
    score      a layer's temporaries, the last hidden states, and a chunk with entropy
    generate   the embedded engine's KV cache at the longest sequence, its copy when ended rows
               leave it, 18 B V of sampling (bf16 logits, two fp32, one float64)

In flight on stage p of n: min(m, n - p) microbatches (1F1B); with v virtual chunks
min(m v, 2 (n - p - 1) + (v - 1) n + 1) chunks, counted as the largest chunk; all m with
train.scoring=fused. Microbatches are taken at the longest sequence, packs as full.

The allowance covers what is not counted: CUDA's context, NCCL's and cuBLAS's buffers, and 5 % of
the phase for the allocator's fragmentation.

A checkpoint is staged in host memory. Megatron gathers optimizer state on the first data-parallel
rank, whose copy is the largest: P x (2 or 4) + P x 12.
"""

from dataclasses import dataclass

from megatron_p3o.architecture import ModelArchitecture, padded_vocab_size
from megatron_p3o.config import RunConfig
from megatron_p3o.parallel.layout import ParallelLayout
from megatron_p3o.plan.activations import LayerCost, kept_by_layer, temporaries_of_layer
from megatron_p3o.plan.batch import Lengths, StepBatch, step_batch
from megatron_p3o.plan.parameters import (
    StageParameters,
    chunk_layers,
    count_stages,
    model_weights,
)
from megatron_p3o.plan.precision import Precision
from megatron_p3o.plan.serving import embedded_kv_bytes

CONTEXT_BYTES = 3e9
FRAGMENTATION = 0.05
_GRADIENT_BYTES = 4
_CHECKPOINT_OPTIMIZER_BYTES = 12
_CHUNK_BYTES, _CHUNK_WITH_ENTROPY_BYTES = 8, 16
_SAMPLING_BYTES = 18


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Bytes on every rank of one pipeline stage."""

    stage: int
    resident: dict[str, float]
    phases: dict[str, dict[str, float]]
    """Phase -> part -> bytes."""
    host_checkpoint: float
    """Host memory of the first data-parallel rank while a checkpoint is written."""

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def allowance(self) -> float:
        return CONTEXT_BYTES + FRAGMENTATION * sum(self.phases[self.peak_phase].values())

    @property
    def total(self) -> float:
        phase = sum(self.phases[self.peak_phase].values())
        return sum(self.resident.values()) + phase + self.allowance


def trainer_memory(
    config: RunConfig,
    architecture: ModelArchitecture,
    layout: ParallelLayout,
    longest: Lengths,
    reference: ModelArchitecture | None,
) -> list[StageMemory]:
    """By pipeline stage.

    Args:
        config: of the run.
        architecture: of the policy; it must fit the layout.
        layout: with its data-parallel size.
        longest: sequence that may be sampled.
        reference: architecture of the reference model; None without a reference KL.
    """
    precision = Precision.of(config.precision)
    batch = step_batch(config, longest, layout.data)
    stages = count_stages(architecture, config.layout)
    of_reference = None if reference is None else count_stages(reference, config.layout)
    memory = []
    for stage, parameters in enumerate(stages):
        resident = _resident(config, parameters, layout, precision)
        if of_reference is not None:
            resident["reference model"] = precision.weight_bytes(of_reference[stage])
        phases = _phases(config, architecture, layout, batch, stage)
        if config.rollout.engine == "embedded":
            resident["rollout model"] = sum(
                w.num_elements * precision.rollout_bytes for w in model_weights(architecture)
            )
            phases["generate"] = _generation(config, architecture, layout, longest, precision)
        held = precision.trainer_bytes + _CHECKPOINT_OPTIMIZER_BYTES
        memory.append(
            StageMemory(
                stage=stage,
                resident=resident,
                phases=phases,
                host_checkpoint=parameters.total * held if config.checkpoint.every else 0,
            )
        )
    return memory


def _resident(
    config: RunConfig, parameters: StageParameters, layout: ParallelLayout, precision: Precision
) -> dict[str, float]:
    shards = expert_shards = 1
    if config.optimizer.distributed:
        shards = layout.data * layout.context
        expert_shards = layout.tensor * shards // (layout.expert * layout.expert_tensor)
    per_rank = parameters.dense / shards + parameters.expert / expert_shards
    return {
        "weights": precision.weight_bytes(parameters),
        "gradients": parameters.total * _GRADIENT_BYTES,
        "optimizer": per_rank * precision.optimizer_bytes,
    }


def _phases(
    config: RunConfig,
    architecture: ModelArchitecture,
    layout: ParallelLayout,
    batch: StepBatch,
    stage: int,
) -> dict[str, dict[str, float]]:
    cost = LayerCost(
        layout=config.layout,
        precision=Precision.of(config.precision),
        recompute=config.train.recompute,
    )
    tokens = batch.microbatch_tokens / layout.context
    chunks = chunk_layers(architecture.num_layers, config.layout)[stage]
    layers = [layer for chunk in chunks for layer in chunk]
    full = {n: sum(kept_by_layer(architecture, n, cost).values()) for n in layers}
    is_recomputed = config.train.recompute == "full"
    kept = {n: cost.hidden(architecture) if is_recomputed else full[n] for n in layers}
    in_flight = chunks_in_flight(config, batch.microbatches, stage)
    widest = max((sum(kept[n] for n in chunk) for chunk in chunks), default=0.0)
    work = max((temporaries_of_layer(architecture, n, cost) for n in layers), default=0.0)
    train = {
        "activations": tokens * in_flight * widest,
        "recomputed layer": tokens * max(full.values(), default=0.0) * is_recomputed,
        "temporaries": tokens * work,
    }
    score = {"temporaries": tokens * (work + cost.hidden(architecture))}
    if stage == layout.pipeline - 1:
        microbatches = in_flight if config.train.scoring == "fused" else 1
        train |= _train_head(config, architecture, layout, tokens, microbatches)
        score |= {
            "hidden states": 2 * tokens * architecture.hidden_size * cost.number,
            "log-prob chunk": _chunk(config, architecture, layout, tokens)
            * _CHUNK_WITH_ENTROPY_BYTES,
        }
    return {"train": train, "score": score}


def chunks_in_flight(config: RunConfig, microbatches: int, stage: int) -> int:
    """Microbatches whose activations a stage holds at once; model chunks with a virtual
    pipeline."""
    size, virtual = config.layout.pipeline, config.layout.virtual_pipeline
    if config.train.scoring == "fused":
        return microbatches
    if virtual == 1:
        return min(microbatches, size - stage)
    return min(microbatches * virtual, 2 * (size - stage - 1) + (virtual - 1) * size + 1)


def _train_head(
    config: RunConfig,
    architecture: ModelArchitecture,
    layout: ParallelLayout,
    tokens: float,
    microbatches: int,
) -> dict[str, float]:
    precision = Precision.of(config.precision)
    with_entropy = config.train.scoring == "fused" or config.objective.entropy_coefficient > 0
    rows = padded_vocab_size(architecture.vocab_size, layout.tensor) // layout.tensor
    hidden = architecture.hidden_size * precision.trainer_bytes
    # The final norm's input and, for the log-probs, the predicted tokens' hidden states.
    kept = 2 * microbatches * tokens * hidden
    return {
        "hidden states": kept + 2 * tokens * hidden,
        "output weight's gradient": rows * hidden,
        "log-prob chunk": _chunk(config, architecture, layout, tokens)
        * (_CHUNK_WITH_ENTROPY_BYTES if with_entropy else _CHUNK_BYTES),
    }


def _chunk(
    config: RunConfig, architecture: ModelArchitecture, layout: ParallelLayout, tokens: float
) -> float:
    """Numbers in one chunk of logits on one rank."""
    rows = padded_vocab_size(architecture.vocab_size, layout.tensor) // layout.tensor
    return min(config.train.logprob_chunk_tokens, tokens) * rows


def _generation(
    config: RunConfig,
    architecture: ModelArchitecture,
    layout: ParallelLayout,
    longest: Lengths,
    precision: Precision,
) -> dict[str, float]:
    prompts = -(-config.train.prompts_per_step // layout.world_size)
    rows = min(config.rollout.batch_size, prompts * config.train.samples_per_prompt)
    cache = rows * longest.inputs * embedded_kv_bytes(architecture, precision)
    return {
        "KV cache": cache,
        "copy of the KV cache": cache,
        "sampling": rows * architecture.vocab_size * _SAMPLING_BYTES,
    }
