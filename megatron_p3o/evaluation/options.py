"""What `p3o eval` is asked for. Imports no torch."""

import math
from dataclasses import dataclass
from pathlib import Path

from megatron_p3o.config import DataSection, RewardSection, RunConfig, SamplingSection
from megatron_p3o.errors import ConfigurationError

_SUFFIXES = {".jsonl": "jsonl", ".parquet": "parquet"}
_K_STEP = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    """The words of the command line; None: as the run has it, or the default of its field."""

    target: Path
    """A model directory, a checkpoint, a run dir or a RUN.yaml."""
    run: Path | None = None
    """RUN.yaml whose data, sampling and precision are used with another target's weights."""
    data: Path | None = None
    """A JSONL or parquet file, in place of the run's data."""
    num_samples: int = 16
    ks: tuple[int, ...] = ()
    """Empty: 1, 4, 16 and so on, up to `num_samples`."""
    threshold: float | None = None
    reward: str | None = None
    chat: bool | None = None
    prompt_field: str | None = None
    answer_field: str | None = None
    temperature: float | None = None
    max_new_tokens: int | None = None
    seed: int | None = None
    limit: int | None = None
    batch_size: int | None = None
    engine: str = "embedded"
    servers: tuple[str, ...] = ()
    out: Path | None = None

    def check(self) -> None:
        """Check what can be checked without a file's content.

        Raises:
            ConfigurationError: a value is not legal, or contradicts another.
        """
        for flag, value in (
            ("--n", self.num_samples),
            ("--max-new-tokens", self.max_new_tokens),
            ("--limit", self.limit),
            ("--batch-size", self.batch_size),
            *(("--k", k) for k in self.ks),
        ):
            if value is not None and value < 1:
                raise ConfigurationError(f"{flag}={value} must be >= 1; raise it")
        if self.ks and max(self.ks) > self.num_samples:
            raise ConfigurationError(
                f"--k={max(self.ks)} must be at most --n={self.num_samples}, since pass@k is "
                "estimated from n >= k samples; raise --n or lower --k"
            )
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise ConfigurationError(
                f"--temperature={self.temperature} must be above 0 and finite; use 1"
            )
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise ConfigurationError(f"--threshold={self.threshold} must be finite; use 0.5")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigurationError(f"--seed={self.seed} must be from 0 to 2^63 - 1; use 0")
        if self.data is not None and self.data.suffix not in _SUFFIXES:
            raise ConfigurationError(
                f"--data={str(self.data)!r} must end in {' or '.join(_SUFFIXES)}, which says how "
                "it is read; rename it"
            )
        self._check_engine()

    def pass_at(self) -> tuple[int, ...]:
        """The k of pass@k, in order."""
        powers = (_K_STEP**power for power in range(self.num_samples.bit_length()))
        return tuple(sorted(set(self.ks))) or tuple(k for k in powers if k <= self.num_samples)

    def data_section(self, config: RunConfig | None) -> DataSection:
        """What to evaluate on: --data, else the run's `eval.data`, else its `data`.

        Raises:
            ConfigurationError: nothing says so.
        """
        section = None if config is None else config.eval_data
        if self.data is None and section is None:
            raise ConfigurationError(
                f"MODEL_OR_RUN={str(self.target)!r} says nothing about data; add --data "
                "FILE.jsonl, or --run RUN.yaml for the data and sampling of a run"
            )
        changes: dict[str, object] = {}
        if self.data is not None:
            source = _SUFFIXES[self.data.suffix]
            changes |= {"source": source, "path": str(self.data), "generator": None}
            section = section or DataSection.model_validate(
                {"source": source, "path": str(self.data)}
            )
        assert section is not None
        for name in ("chat", "prompt_field", "answer_field"):
            if (value := getattr(self, name)) is not None:
                changes[name] = value
        if self.chat is False:
            changes["system_prompt"] = None
        if self.reward is not None:
            changes["reward"] = RewardSection(
                **(section.reward.model_dump() | {"name": self.reward})
            )
        return section.model_copy(update=changes)

    def sampling(self, config: RunConfig | None) -> SamplingSection:
        """The words, else what the run's own evaluations use."""
        section = SamplingSection() if config is None else config.eval_sampling
        given = {"temperature": self.temperature, "max_new_tokens": self.max_new_tokens}
        return section.model_copy(update={k: v for k, v in given.items() if v is not None})

    def _check_engine(self) -> None:
        if self.engine not in ("embedded", "sglang"):
            raise ConfigurationError(f"--engine={self.engine} must be embedded or sglang")
        if (self.engine == "sglang") != bool(self.servers):
            raise ConfigurationError(
                f"--engine={self.engine} with --servers={','.join(self.servers) or None}: running "
                "servers are what --engine sglang generates on, and nothing else does; set both "
                "or neither"
            )
