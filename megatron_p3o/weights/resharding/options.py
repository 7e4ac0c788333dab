"""What a user may ask of a conversion."""

from dataclasses import dataclass, field
from pathlib import Path

from megatron_p3o.errors import ConfigurationError
from megatron_p3o.weights.resharding.target import TargetLayout

FORMATS = ("hf", "torch_dist", "torch")
DTYPES = ("keep", "bf16", "fp32", "fp8-block")
NAMES = ("te", "local")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReshardOptions:
    """Everything but source and destination."""

    to: str
    """One of `FORMATS`."""
    layout: TargetLayout = field(default_factory=TargetLayout)
    dtype: str = "keep"
    """One of `DTYPES`."""
    names: str = "te"
    """For `torch`, one of `NAMES`: those of Transformer Engine's layers or of Megatron's local
    ones."""
    optimizer: bool = False
    """Carry the optimizer's state along, from torch_dist to torch_dist."""
    workers: int = 2
    verify: bool = False
    max_shard_bytes: int = 5_000_000_000
    """For `hf`."""
    allow_nonfinite: bool = False
    unsafe_pickle: bool = False
    config_dir: Path | None = None
    """Directory with the config.json of a Megatron checkpoint that has none."""

    def check(self) -> None:
        """Check what can be checked without a source.

        Raises:
            ConfigurationError: a value is not legal, or contradicts another.
        """
        for name, value, legal in (
            ("--to", self.to, FORMATS),
            ("--dtype", self.dtype, DTYPES),
            ("--names", self.names, NAMES),
        ):
            if value not in legal:
                raise ConfigurationError(f"{name}={value} must be one of {', '.join(legal)}")
        if self.dtype == "fp8-block" and self.to != "hf":
            raise ConfigurationError(
                f"--dtype=fp8-block with --to={self.to} is not supported: Megatron's checkpoints "
                "have no FP8 blocks; use --to hf"
            )
        if self.to == "hf" and self.layout != TargetLayout():
            raise ConfigurationError(
                "--tp, --pp, --vpp, --ep, --etp, --chunk-layers and --vocab-divisible-by cut "
                "Megatron checkpoints, not --to=hf; leave them out"
            )
        if self.workers < 1:
            raise ConfigurationError(f"--workers={self.workers} must be >= 1; use 2")
        if self.max_shard_bytes < 1:
            raise ConfigurationError(
                f"--max-shard-size={self.max_shard_bytes} must be above 0; use 5GB"
            )
