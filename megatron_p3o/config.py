"""The configuration of a run: one frozen tree, `RunConfig`, from YAML plus dotted overrides.

Imports no torch, so that a study tool, a login node or an editor can validate a file. Every rule
that needs only the configuration is checked here; rules that need the model's or the data's files
are checked by `megatron_p3o.preflight`, before anything heavy starts.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from megatron_p3o.errors import ConfigurationError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RunSection(_Section):
    dir: str
    """Where the run writes: config.yaml, metrics.jsonl, samples.jsonl, checkpoints/."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seeds data order and sampling noise."""
    record: bool = True
    """Write every sample to samples.jsonl, which `rollout.engine: replay` can read back."""
    num_threads_per_rank: PositiveInt | None = None
    """CPU threads of each rank; None shares the machine's cores among its ranks."""
    tensorboard: bool = False
    """Also write the metrics as TensorBoard events (extra `tensorboard`)."""


class ModelSection(_Section):
    path: str
    """A Hugging Face model directory: config.json, safetensors, tokenizer files."""


class RewardSection(_Section):
    name: str = "integer_match"
    """A built-in verifier (`integer_match`, `math_equivalence`) or `module:function`."""
    timeout_s: PositiveFloat = 10.0
    """Seconds one reward may take; a slower one counts as failed."""
    max_failure_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Greatest share of a step's rewards that may raise or time out before the run stops."""


class DataSection(_Section):
    source: Literal["jsonl", "parquet", "generator"]
    path: str | None = None
    """The prompt file, for jsonl and parquet."""
    generator: str | None = None
    """For source generator: `arithmetic` or `module:function` giving (prompt, answer) items."""
    generator_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the generator."""
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    chat: bool = True
    """Wrap the prompt as a user turn by the tokenizer's chat template."""
    system_prompt: str | None = None
    """None: no system turn at all, not even the template's default."""
    max_prompt_tokens: PositiveInt = 1024
    """A longer prompt is refused when it is read."""
    shuffle: bool = True
    """Draw every epoch in its own order, derived from run.seed."""
    reward: RewardSection = RewardSection()

    @model_validator(mode="after")
    def _source_fields(self) -> "DataSection":
        needed = "generator" if self.source == "generator" else "path"
        unused = "path" if needed == "generator" else "generator"
        if getattr(self, needed) is None:
            raise ValueError(f"data.{needed} is needed by data.source={self.source}; set it")
        if getattr(self, unused) is not None:
            raise ValueError(
                f"data.{unused}={getattr(self, unused)!r} is not used by "
                f"data.source={self.source}; remove it"
            )
        return self


class LayoutSection(_Section):
    """Sizes of the parallel axes; `megatron_p3o.parallel.layout` turns them into ranks."""

    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    virtual_pipeline: PositiveInt = 1
    context: PositiveInt = 1
    expert: PositiveInt = 1
    expert_tensor: PositiveInt = 1
    data: PositiveInt | None = None
    """None: follows from the number of ranks."""
    sequence_parallel: bool = False

    @model_validator(mode="after")
    def _built_axes(self) -> "LayoutSection":
        for axis in ("virtual_pipeline", "context", "expert", "expert_tensor"):
            if getattr(self, axis) != 1:
                raise ValueError(
                    f"layout.{axis}={getattr(self, axis)} must be 1: this version trains over "
                    "tensor, pipeline and data; use those axes"
                )
        if self.sequence_parallel:
            raise ValueError(
                "layout.sequence_parallel=true must be false: this version trains over tensor, "
                "pipeline and data without it; remove it"
            )
        return self

    @property
    def model_parallel_size(self) -> int:
        """Ranks that one copy of the model takes: tensor x pipeline x context."""
        return self.tensor * self.pipeline * self.context


class TrainSection(_Section):
    steps: PositiveInt
    """Rollout batches; each brings `optimizer_steps_per_rollout` optimizer steps."""
    prompts_per_step: PositiveInt
    samples_per_prompt: PositiveInt
    optimizer_steps_per_rollout: PositiveInt = 1
    """Optimizer steps per rollout batch; each has its own exact ESS."""
    microbatch_size: PositiveInt = 8
    """Sequences per microbatch; changes speed and memory, not the update."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at once, in fp32: [chunk, vocab / tensor]."""
    recompute: Literal["none", "full"] = "none"
    """Keep activations, or recompute every layer in the backward pass."""

    @model_validator(mode="after")
    def _divides(self) -> "TrainSection":
        if self.prompts_per_step % self.optimizer_steps_per_rollout:
            raise ValueError(
                f"train.optimizer_steps_per_rollout={self.optimizer_steps_per_rollout} must divide "
                f"train.prompts_per_step={self.prompts_per_step}, so that groups stay whole; "
                "choose a divisor"
            )
        return self


class OptimizerSection(_Section):
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


class _Objective(_Section):
    advantage: Literal["group_zscore", "group_mean", "none"] = "group_zscore"
    """(r - mean) / (std + 1e-6) with the n-1 std; r - mean; or the reward itself."""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus: the loss gains -coefficient * H per token."""


class P3OObjective(_Objective):
    """`megatron_p3o.algorithms.p3o`; the defaults are the paper's algorithm."""

    name: Literal["p3o"] = "p3o"
    cap: Literal["ess", "none", "constant"] = "ess"
    """What bounds the ratio: the batch's ESS, nothing, or `cap_constant`."""
    cap_constant: PositiveFloat | None = None
    regularizer: Literal["adaptive", "constant", "off"] = "adaptive"
    """Weight of the KL term: 1 - ESS, `regularizer_constant`, or 0."""
    regularizer_constant: PositiveFloat | None = None
    kl_estimator: Literal["k1", "k2", "k3", "k3_importance"] = "k3"

    @model_validator(mode="after")
    def _constants(self) -> "P3OObjective":
        for switch in ("cap", "regularizer"):
            mode, constant = getattr(self, switch), getattr(self, f"{switch}_constant")
            if (mode == "constant") != (constant is not None):
                raise ValueError(
                    f"objective.{switch}_constant={constant} goes with objective.{switch}=constant "
                    f"and only with it (got {mode}); set both or neither"
                )
        return self


class ReinforceObjective(_Objective):
    """Plain score-function gradient: no ratio, no clip."""

    name: Literal["reinforce"] = "reinforce"


class GRPOObjective(_Objective):
    """Clipped surrogate against the rollout engine's log-probs."""

    name: Literal["grpo"] = "grpo"
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    clip_high: PositiveFloat = 0.2
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of k3 between trainer and rollout policy."""
    normalization: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Mean over the step's tokens, or the mean over sequences of each one's token mean."""


Objective = Annotated[
    P3OObjective | ReinforceObjective | GRPOObjective, Field(discriminator="name")
]


class EssSection(_Section):
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


class RolloutSection(_Section):
    engine: Literal["embedded", "replay"] = "embedded"
    replay_path: str | None = None
    """A recorded samples.jsonl, for engine replay."""
    max_staleness: Annotated[int, Field(ge=0, le=0)] = 0
    """Weight versions a sample may lag when it is trained on; this version is synchronous (0)."""
    batch_size: PositiveInt = 64
    """Sequences that the embedded engine decodes together."""

    @model_validator(mode="after")
    def _replay(self) -> "RolloutSection":
        if (self.engine == "replay") != (self.replay_path is not None):
            raise ValueError(
                f"rollout.replay_path={self.replay_path!r} goes with rollout.engine=replay and "
                f"only with it (got {self.engine}); set both or neither"
            )
        return self


class SamplingSection(_Section):
    temperature: PositiveFloat = 1.0
    """Logits are divided by it, in the rollout and in the trainer's log-probs alike."""
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: PositiveInt = 128

    @model_validator(mode="after")
    def _untruncated(self) -> "SamplingSection":
        if self.top_p != 1.0 or self.top_k != -1:
            raise ValueError(
                f"sampling.top_p={self.top_p}, sampling.top_k={self.top_k}: training needs top_p=1 "
                "and top_k=-1, since a truncated distribution makes every policy ratio wrong; "
                "remove them"
            )
        return self


class PrecisionSection(_Section):
    trainer: Literal["fp32", "bf16"] = "fp32"
    """Compute type of the trainer; master weights and gradients are fp32 either way."""
    rollout: Literal["fp32", "bf16"] = "fp32"
    """Type of the rollout engine's weights and activations."""


class CheckpointSection(_Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Save every this many steps, and at the end; 0 saves nothing."""
    keep: PositiveInt = 2
    """Complete checkpoints to keep; older ones are removed after a newer one is complete."""


class RunConfig(_Section):
    """Everything that decides a run. Frozen; the resolved tree is written to the run dir."""

    run: RunSection
    model: ModelSection
    data: DataSection
    train: TrainSection
    layout: LayoutSection = LayoutSection()
    optimizer: OptimizerSection = OptimizerSection()
    objective: Objective = P3OObjective()
    ess: EssSection = EssSection()
    rollout: RolloutSection = RolloutSection()
    sampling: SamplingSection = SamplingSection()
    precision: PrecisionSection = PrecisionSection()
    checkpoint: CheckpointSection = CheckpointSection()

    @model_validator(mode="after")
    def _cross_section(self) -> "RunConfig":
        group = self.train.samples_per_prompt
        if self.objective.advantage != "none" and group < 2:
            raise ValueError(
                f"train.samples_per_prompt={group} must be >= 2 with objective.advantage="
                f"{self.objective.advantage}, which compares samples of one prompt; raise it or "
                "set objective.advantage=none"
            )
        return self


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, apply `--section.field value` overrides, validate.

    Args:
        path: the YAML file.
        overrides: command-line words, such as `["--optimizer.lr", "1e-5", "--run.seed=3"]`.
            Values are read as YAML.

    Raises:
        ConfigurationError: the file is missing or no YAML mapping, an override is malformed, or
            any rule is broken; the message names every offending field.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"configuration file {str(path)!r} cannot be read: {error}") from error
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"configuration file {str(path)!r} is not YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigurationError(
            f"configuration file {str(path)!r} must hold a mapping with sections such as run, "
            f"model, data, train; it holds {type(tree).__name__}"
        )
    for dotted, value in parse_overrides(overrides):
        _set_dotted(tree, dotted, value)
    return parse_config(tree)


def parse_config(tree: Mapping[str, Any]) -> RunConfig:
    """Validate a nested mapping.

    Raises:
        ConfigurationError: names every field that breaks a rule.
    """
    try:
        # JSON mode, strict: "8" or true is no integer, 1 is a float, a list is a tuple.
        return RunConfig.model_validate_json(json.dumps(_numbers(tree), default=str), strict=True)
    except ValidationError as error:
        raise ConfigurationError(_explain(error)) from error


def parse_overrides(words: Sequence[str]) -> list[tuple[str, Any]]:
    """`["--a.b", "1", "--c.d=x"]` -> `[("a.b", 1), ("c.d", "x")]`; values are read as YAML.

    Raises:
        ConfigurationError: a word is not `--section.field`, or its value is missing or no YAML.
    """
    pairs = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("--") or "." not in word.partition("=")[0]:
            raise ConfigurationError(
                f"override {word!r} must be --section.field VALUE, such as --optimizer.lr 1e-5"
            )
        dotted, equals, raw = word[2:].partition("=")
        if not equals:
            if not remaining:
                raise ConfigurationError(f"override --{dotted} needs a value; add one after it")
            raw = remaining.pop(0)
        try:
            pairs.append((dotted, yaml.safe_load(raw)))
        except yaml.YAMLError as error:
            raise ConfigurationError(f"override --{dotted} {raw!r} is not YAML: {error}") from error
    return pairs


def to_yaml(config: RunConfig) -> str:
    """The resolved configuration; `load_config` of it gives an equal tree."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def json_schema() -> str:
    """JSON schema of the configuration, for editors and documentation."""
    return json.dumps(RunConfig.model_json_schema(), indent=2)


def _set_dotted(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    node = tree
    for depth, name in enumerate(parents):
        child = node.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigurationError(
                f"override --{dotted}: {'.'.join(parents[: depth + 1])} is a value, not a section"
            )
        node = child
    node[leaf] = value


def _numbers(node: Any) -> Any:
    """YAML 1.1 reads `1e-5` as text (it wants `1.0e-5`); people mean a number."""
    if isinstance(node, Mapping):
        return {key: _numbers(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_numbers(value) for value in node]
    if isinstance(node, str) and node[:1] in "+-.0123456789" and "e" in node.lower():
        try:
            return float(node)
        except ValueError:
            return node
    return node


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        # A discriminated union adds its tag to the location; the user's file has no such level.
        location = [str(part) for part in item["loc"] if part not in ("p3o", "reinforce", "grpo")]
        field = ".".join(location)
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "value_error":
            lines.append(message)
        elif item["type"] == "extra_forbidden":
            lines.append(f"{field}={item['input']!r}: no such field; remove it or mend its name")
        elif item["type"] == "missing":
            lines.append(f"{field} is missing; set it")
        else:
            lines.append(f"{field}={item['input']!r}: {message}")
    return "\n".join(lines)
