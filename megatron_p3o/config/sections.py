"""The sections of a run's configuration and the tree that holds them."""

import math
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatron_p3o.config.data import DataSection, EvalSection
from megatron_p3o.config.layout import LayoutSection
from megatron_p3o.config.loggers import LoggingSection
from megatron_p3o.config.objectives import Objective, P3OObjective, ReferenceSection
from megatron_p3o.config.precision import PrecisionSection
from megatron_p3o.config.rollout import RolloutSection, SamplingSection
from megatron_p3o.config.section import Section


class RunSection(Section):
    dir: Annotated[str, Field(min_length=1)]
    """Where the run writes: config.yaml, metrics.jsonl, samples.jsonl, checkpoints/."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seeds data order and sampling noise."""
    record: bool = True
    """Write every sample to samples.jsonl, which `rollout.engine: replay` can read back."""
    num_threads_per_rank: PositiveInt | None = None
    """CPU threads of each rank; None shares the machine's cores among its ranks."""
    tensorboard: bool = False
    """Also write the metrics as TensorBoard events (extra `tensorboard`)."""


class ModelSection(Section):
    path: Annotated[str, Field(min_length=1)]
    """A Hugging Face model directory: config.json, safetensors, tokenizer files."""
    moe_aux_loss_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of Megatron's load-balancing loss for mixture-of-experts models. That loss is taken
    over each microbatch and counts padding, so with any weight above 0 the update depends on how
    the batch is split; at 0 it does not."""
    router_replay: bool = False
    """Send every token to the experts that the rollout engine's router chose, so that trainer and
    rollout compute with the same experts; their weights still come from the trainer's router. The
    engine must report its choices (`embedded` and `sglang` do), or the recording hold them."""


class DynamicSamplingSection(Section):
    """DAPO's dynamic sampling (arXiv:2503.14476), with a bound: a group whose rewards are all
    equal teaches nothing, and gives its place to a fresh prompt."""

    max_rounds: NonNegativeInt = 0
    """Rounds of replacement per step; 0 turns it off. Groups that are still equal after the last
    round stay."""


class TrainSection(Section):
    steps: PositiveInt
    """Rollout batches; each brings `optimizer_steps_per_rollout` optimizer steps."""
    prompts_per_step: PositiveInt
    samples_per_prompt: PositiveInt
    optimizer_steps_per_rollout: PositiveInt = 1
    """Optimizer steps per rollout batch; each has its own exact ESS."""
    microbatch_size: PositiveInt = 8
    """Sequences per padded microbatch; changes speed and memory, not the update."""
    packing: bool = False
    """Pack sequences of any length one after the other under max_tokens_per_microbatch, instead
    of padding microbatch_size of them to one length; changes speed and memory, not the update."""
    max_tokens_per_microbatch: PositiveInt | None = None
    """Tokens of a packed microbatch: prompts, responses and padding, over all context ranks.
    Microbatches are balanced by their cost, in which attention is quadratic."""
    dynamic_sampling: DynamicSamplingSection = DynamicSamplingSection()
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at once, in fp32: [chunk, vocab / tensor]."""
    scoring: Literal["separate", "fused"] = "separate"
    """How the ESS is known before the backward pass: by a forward pass of its own, or by running
    every microbatch's forward before the first backward, which saves that pass and keeps the
    activations of the whole optimizer step."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Keep activations, or recompute in the backward pass: only the attention between the
    projections, or every layer."""

    @model_validator(mode="after")
    def _divides(self) -> "TrainSection":
        if self.prompts_per_step % self.optimizer_steps_per_rollout:
            raise ValueError(
                f"train.optimizer_steps_per_rollout={self.optimizer_steps_per_rollout} must divide "
                f"train.prompts_per_step={self.prompts_per_step}, so that groups stay whole; "
                "choose a divisor"
            )
        return self

    @model_validator(mode="after")
    def _packing(self) -> "TrainSection":
        if self.packing != (self.max_tokens_per_microbatch is not None):
            raise ValueError(
                f"train.max_tokens_per_microbatch={self.max_tokens_per_microbatch} goes with "
                f"train.packing=true and only with it (got {str(self.packing).lower()}); set both "
                "or neither"
            )
        return self


class OptimizerSection(Section):
    lr: PositiveFloat = 1e-6
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Where linear and cosine decay end."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which lr rises linearly from 0."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.95,
    )
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """Global gradient norm above which gradients are scaled down; 0 turns clipping off."""
    distributed: bool = True
    """Shard optimizer state over data-parallel ranks (Megatron's DistributedOptimizer)."""

    @model_validator(mode="after")
    def _min_below_max(self) -> "OptimizerSection":
        if self.min_lr > self.lr:
            raise ValueError(
                f"optimizer.min_lr={self.min_lr} must be <= optimizer.lr={self.lr}; lower it"
            )
        return self


class EssSection(Section):
    scope: Literal["step", "microbatch"] = "step"
    """Tokens that one ESS speaks of: the whole optimizer step (exact, independent of the split),
    or each microbatch over data-parallel ranks (as the authors' code)."""
    mean_ratio_band: tuple[PositiveFloat, PositiveFloat] = (0.8, 1.25)
    """Warn when the mean ratio leaves this band: ESS does not see a uniform scale."""
    min_ess: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Warn when ESS falls below."""

    @model_validator(mode="after")
    def _band(self) -> "EssSection":
        low, high = self.mean_ratio_band
        if not low < 1 < high:
            raise ValueError(
                f"ess.mean_ratio_band={[low, high]} must contain 1 strictly inside; "
                "for example [0.8, 1.25]"
            )
        return self


class CheckpointSection(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Save every this many steps, and at the end; 0 saves nothing."""
    asynchronous: bool = True
    """Train on while a checkpoint is written, from a copy in host memory. False waits for it."""
    keep: PositiveInt = 2
    """Complete checkpoints to keep; older ones are removed after a newer one is complete."""


class RunConfig(Section):
    """Everything that decides a run. Frozen; the resolved tree is written to the run dir."""

    run: RunSection
    model: ModelSection
    data: DataSection
    train: TrainSection
    layout: LayoutSection = LayoutSection()
    optimizer: OptimizerSection = OptimizerSection()
    objective: Objective = P3OObjective()
    reference: ReferenceSection = ReferenceSection()
    ess: EssSection = EssSection()
    rollout: RolloutSection = RolloutSection()
    sampling: SamplingSection = SamplingSection()
    precision: PrecisionSection = PrecisionSection()
    checkpoint: CheckpointSection = CheckpointSection()
    logging: LoggingSection = LoggingSection()
    eval: EvalSection = EvalSection()

    @model_validator(mode="after")
    def _cross_section(self) -> "RunConfig":
        if self.train.scoring == "fused" and self.layout.pipeline > 1:
            raise ValueError(
                f"train.scoring=fused needs layout.pipeline=1 (got {self.layout.pipeline}), since "
                "pipeline schedules interleave forward and backward; use train.scoring=separate"
            )
        if (self.objective.name == "sft") != (self.rollout.engine == "answers"):
            raise ValueError(
                f"objective.name={self.objective.name} with rollout.engine={self.rollout.engine}: "
                "sft trains on the data's own answers, and nothing else does; set both "
                "objective.name=sft and rollout.engine=answers, or neither"
            )
        group = self.train.samples_per_prompt
        if self.objective.advantage != "none" and group < 2:
            raise ValueError(
                f"train.samples_per_prompt={group} must be >= 2 with objective.advantage="
                f"{self.objective.advantage}, which compares samples of one prompt; raise it or "
                "set objective.advantage=none"
            )
        return self

    @model_validator(mode="after")
    def _sequences_fit(self) -> "RunConfig":
        """Packs and context shards against the longest sequence that can be sampled."""
        multiple, budget = self.sequence_multiple, self.train.max_tokens_per_microbatch
        if budget is not None and budget < multiple:
            raise ValueError(
                f"train.max_tokens_per_microbatch={budget} must hold one sequence, which "
                f"layout.context={self.layout.context}, layout.sequence_parallel and "
                f"precision.trainer={self.precision.trainer} pad to a multiple of {multiple} "
                f"tokens; raise it to {multiple} or shrink layout.context"
            )
        if self.rollout.engine == "replay":  # its lengths are those of the recording
            return self
        longest = self.data.max_prompt_tokens + self.sampling.max_new_tokens - 1
        sum_of = "data.max_prompt_tokens + sampling.max_new_tokens - 1"
        if self.layout.context > 1 and longest < 2 * self.layout.context:
            raise ValueError(
                f"layout.context={self.layout.context} cuts a sequence into 2 x context parts, but "
                f"the longest has {longest} tokens ({sum_of}); the nearest legal value is "
                f"{max(1, longest // 2)}"
            )
        padded = -(-longest // multiple) * multiple
        if budget is not None and budget < padded:
            raise ValueError(
                f"train.max_tokens_per_microbatch={budget} must hold the longest sequence: "
                f"{longest} tokens ({sum_of}), {padded} when padded to a multiple of {multiple}; "
                f"raise it to {padded} or lower data.max_prompt_tokens or sampling.max_new_tokens"
            )
        return self

    @model_validator(mode="after")
    def _dynamic_sampling(self) -> "RunConfig":
        rounds = self.train.dynamic_sampling.max_rounds
        if rounds and self.objective.advantage == "none":
            raise ValueError(
                f"train.dynamic_sampling.max_rounds={rounds} drops groups of equal rewards, which "
                "do teach with objective.advantage=none; set it to 0 or choose another advantage"
            )
        if rounds and self.rollout.engine == "replay":
            raise ValueError(
                f"train.dynamic_sampling.max_rounds={rounds} must be 0 with rollout.engine=replay: "
                "a recording holds the groups that were kept and no prompts to draw; set it to 0"
            )
        return self

    @model_validator(mode="after")
    def _served(self) -> "RunConfig":
        """What SGLang servers cannot do, and what FP8 parameters need."""
        precision = self.precision
        if self.rollout.engine == "sglang":
            if precision.rollout == "fp8-tensor":
                raise ValueError(
                    "precision.rollout=fp8-tensor is emulated by rollout.engine=embedded alone: "
                    "SGLang transposes weights with one scale after loading them and then takes "
                    "no updates; use fp8-block"
                )
            for field, default in (
                ("rollout_activations", "quantized"),
                ("rollout_format", "e4m3"),
            ):
                value = getattr(precision, field)
                if value != default:
                    raise ValueError(
                        f"precision.{field}={value} is emulated by rollout.engine=embedded alone; "
                        "SGLang's FP8 layers quantise activations in e4m3: remove it"
                    )
        if precision.fp8.param_gather and not self.optimizer.distributed:
            raise ValueError(
                "precision.fp8.param_gather=true keeps the exact weights in the distributed "
                "optimizer and needs optimizer.distributed=true (got false); set it or remove "
                "param_gather"
            )
        return self

    @model_validator(mode="after")
    def _evaluated(self) -> "RunConfig":
        if self.eval.every and self.rollout.engine == "sglang":
            raise ValueError(
                f"eval.every={self.eval.every} needs an engine in the trainer's process, and "
                "rollout.engine=sglang has none; set eval.every=0 and give the run's checkpoints "
                "to p3o eval"
            )
        return self

    @property
    def eval_data(self) -> DataSection:
        """What the run is evaluated on."""
        return self.eval.data or self.data

    @property
    def eval_sampling(self) -> SamplingSection:
        """How evaluations sample."""
        return SamplingSection(
            temperature=self.eval.temperature or self.sampling.temperature,
            max_new_tokens=self.eval.max_new_tokens or self.sampling.max_new_tokens,
        )

    @property
    def sequence_multiple(self) -> int:
        """Tokens of which every sequence, padding included, is a multiple: the layout's rule, and
        that of FP8 kernels on each rank's part."""
        layout = self.layout
        sharded = layout.tensor if layout.sequence_parallel else 1
        aligned = layout.context * sharded * self.precision.token_alignment
        return math.lcm(layout.sequence_multiple, aligned)

    @property
    def reference_path(self) -> str:
        """Directory of the reference model."""
        return self.reference.model_path or self.model.path

    @property
    def emulates_rollout(self) -> bool:
        """Whether the rollout's FP8 is emulated: the embedded engine has no FP8 kernels."""
        precision = self.precision
        is_fp8 = precision.rollout_is_fp8 or precision.rollout_kv_cache != "auto"
        return is_fp8 and self.rollout.engine == "embedded"

    def notices(self) -> list[str]:
        """What is allowed but may not be meant: sentences to be shown before a run starts."""
        found = []
        steps = self.train.optimizer_steps_per_rollout
        if self.objective.name == "p4o" and steps == 1:
            found.append(
                "objective.name=p4o with train.optimizer_steps_per_rollout=1: the proximal policy "
                "is always the present one, so the second anchor never acts and this is p3o; "
                "raise train.optimizer_steps_per_rollout, or say p3o"
            )
        if self.emulates_rollout:
            found.append(
                f"precision.rollout={self.precision.rollout}, precision.rollout_kv_cache="
                f"{self.precision.rollout_kv_cache}: rollout.engine=embedded emulates FP8, with "
                "rounded numbers in slower products; its speed and memory say nothing about FP8"
            )
        if self.rollout.temperature_shift is not None:
            found.append(
                f"rollout.temperature_shift.sampled_at={self.rollout.temperature_shift.sampled_at} "
                f"is a fault on purpose: the trainer assumes {self.sampling.temperature}"
            )
        if self.rollout.launch.is_open and not self.rollout.has_api_key:
            found.append(
                f"rollout.launch.host={self.rollout.launch.host!r} lets its network use the "
                "servers, which execute what they are sent, without an API key; set "
                "rollout.api_key_env, or listen on 127.0.0.1"
            )
        return found
