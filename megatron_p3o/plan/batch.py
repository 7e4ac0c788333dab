"""How many sequences, tokens and microbatches a step has, if all sequences were equally long.

A sequence of P prompt and R response tokens enters the model as its first S = P + R - 1 tokens and
has R predicted ones. Padded to the layout's multiple it takes S' tokens. With N sequences for each
optimizer step, D data-parallel ranks:

    packed    k = floor(budget / S') sequences a microbatch,  ceil(ceil(N / k) / D) microbatches
    padded    k = train.microbatch_size,                      ceil(ceil(N / D) / k) microbatches

filled up to a multiple of the pipeline stages with a virtual pipeline.
"""

from dataclasses import dataclass

from megatron_p3o.config import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Tokens of one sequence."""

    prompt: int
    response: int

    @property
    def inputs(self) -> int:
        """That enter the model."""
        return self.prompt + self.response - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """One optimizer step on one data-parallel rank."""

    sequences: int
    """Of the optimizer step, on all ranks."""
    sequences_per_rank: int
    """On the rank that has most."""
    microbatches: int
    microbatch_tokens: int
    """Padding included, over all context ranks; a pack counts as full."""


def step_batch(config: RunConfig, lengths: Lengths, data_size: int) -> StepBatch:
    train, layout = config.train, config.layout
    prompts = train.prompts_per_step // train.optimizer_steps_per_rollout
    sequences = prompts * train.samples_per_prompt
    per_rank = -(-sequences // data_size)
    multiple = layout.sequence_multiple
    padded = -(-lengths.inputs // multiple) * multiple
    budget = train.max_tokens_per_microbatch
    if budget is not None:
        per_microbatch = max(1, budget // padded)
        num_packs = -(-sequences // per_microbatch)
        count = -(-num_packs // data_size)
        tokens = min(budget, per_rank * padded)
    else:
        count = -(-per_rank // train.microbatch_size)
        tokens = min(train.microbatch_size, per_rank) * padded
    return StepBatch(
        sequences=sequences,
        sequences_per_rank=per_rank,
        microbatches=count + -count % layout.microbatch_multiple,
        microbatch_tokens=tokens,
    )
