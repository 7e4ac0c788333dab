"""What `p3o study probe` is asked for. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from megatron_p3o.errors import ConfigurationError, InputError
from megatron_p3o.probe.precisions import (
    DEFAULT_PRECISIONS,
    ServingPrecision,
    parse_precision,
)

KINDS = ("parts", "layers")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeOptions:
    """The words of the command line; None: as the run has it, or the default of its field."""

    target: Path
    """A model directory, a checkpoint, a run dir or a RUN.yaml."""
    run: Path | None = None
    """RUN.yaml whose data and sampling are used with another target's weights."""
    prompts: Path | None = None
    """A JSONL file, in place of the run's source of prompts."""
    chat: bool | None = None
    num_prompts: int = 16
    samples_per_prompt: int = 4
    max_new_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    precisions: tuple[str, ...] = DEFAULT_PRECISIONS
    ablate: tuple[str, ...] = ("parts",)
    """Any of `KINDS`, or `none` alone."""
    ablate_precision: str = "fp8-block"
    batch_size: int | None = None
    """Sequences that are decoded or scored together."""
    out: Path | None = None

    def check(self) -> None:
        """Check what can be checked without a file's content.

        Raises:
            UserError: a value is not legal, or contradicts another.
        """
        for flag, value in (
            ("--num-prompts", self.num_prompts),
            ("--samples", self.samples_per_prompt),
            ("--max-new-tokens", self.max_new_tokens),
            ("--batch-size", self.batch_size),
        ):
            if value is not None and value < 1:
                raise ConfigurationError(f"{flag}={value} must be >= 1; raise it")
        if self.temperature is not None and not 0 < self.temperature < float("inf"):
            raise ConfigurationError(
                f"--temperature={self.temperature} must be above 0 and finite; use 1"
            )
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigurationError(f"--seed={self.seed} must be from 0 to 2^63 - 1; use 0")
        self._check_ablation()
        self.serving()
        if self.out is not None and (self.out.is_dir() or not self.out.parent.is_dir()):
            raise InputError(
                f"--out={str(self.out)!r} must be a file in a directory that exists; name another"
            )

    def serving(self) -> tuple[ServingPrecision, ...]:
        """The precisions to compare, each once."""
        return tuple(parse_precision(name) for name in dict.fromkeys(self.precisions))

    def ablation_kinds(self) -> tuple[str, ...]:
        """Those of `KINDS` that are asked for."""
        return tuple(kind for kind in KINDS if kind in self.ablate)

    def ablated(self) -> ServingPrecision:
        """The precision whose parts are rounded alone."""
        return parse_precision(self.ablate_precision, "--ablate-precision")

    def _check_ablation(self) -> None:
        for kind in self.ablate:
            if kind not in (*KINDS, "none"):
                raise ConfigurationError(f"--ablate={kind} must be none, layers or parts")
        if "none" in self.ablate and len(set(self.ablate)) > 1:
            raise ConfigurationError(
                f"--ablate=none with --ablate={', '.join(self.ablation_kinds())} contradict each "
                "other; leave one out"
            )
        if self.ablation_kinds() and not self.ablated().section.rollout_is_fp8:
            raise ConfigurationError(
                f"--ablate-precision={self.ablate_precision} must be one of fp8-block or "
                "fp8-tensor, whose weights are rounded one by one; use fp8-block"
            )
