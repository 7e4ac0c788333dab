"""The sections that say what is asked, how answers are judged, and what is evaluated on the way."""

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megatron_p3o.config.section import Section


class RewardSection(Section):
    name: str = "integer_match"
    """A built-in verifier (`integer_match`, `math_equivalence`) or `module:function`."""
    timeout_s: PositiveFloat = 10.0
    """Seconds one reward may take; a slower one counts as failed."""
    num_workers: PositiveInt = 4
    """With `rollout.engine: sglang`: rewards computed at once, each in a process on rank 0's node.
    With `embedded` every rank has one."""
    max_failure_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Greatest share of a step's rewards that may raise or time out before the run stops."""


class DataSection(Section):
    source: Literal["jsonl", "parquet", "generator"]
    path: str | None = None
    """The prompt file, for jsonl and parquet."""
    generator: str | None = None
    """For source generator: `arithmetic`, `running_sums` or `module:function` giving
    (prompt, answer) items."""
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
        if self.system_prompt is not None and not self.chat:
            raise ValueError(
                f"data.system_prompt={self.system_prompt!r} needs data.chat=true, which gives it a "
                "turn; remove it or turn chat on"
            )
        return self


class EvalSection(Section):
    """Samples on data of their own, judged between training steps; training itself does not
    change. `p3o eval` measures the same of a checkpoint."""

    every: Annotated[int, Field(ge=0)] = 0
    """Evaluate after every this many steps, and after the last; 0 never does."""
    data: DataSection | None = None
    """What to evaluate on, in source order; None: `data`."""
    n: PositiveInt = 4
    """Samples of each prompt."""
    k: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1,)
    """Of pass@k; each at most n."""
    temperature: PositiveFloat | None = None
    """None: `sampling.temperature`."""
    max_new_tokens: PositiveInt | None = None
    """None: `sampling.max_new_tokens`."""
    limit: PositiveInt | None = None
    """The first prompts; None: all."""
    threshold: float = 0.5
    """A sample is correct when its reward is at least this."""

    @model_validator(mode="after")
    def _k_up_to_n(self) -> "EvalSection":
        if max(self.k) > self.n:
            raise ValueError(
                f"eval.k={list(self.k)} must be at most eval.n={self.n}, since pass@k is estimated "
                "from n >= k samples; raise eval.n or lower eval.k"
            )
        return self
