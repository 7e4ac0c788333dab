"""What the doctor has to say of one thing."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "fallback", "warning", "broken"]
"""`fallback`: something optional is missing and something else is used. `warning`: training can
run, but slower or at a risk. `broken`: training cannot run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """
    Example:
        Finding(part="Transformer Engine", status="fallback", found="not installed",
                used="Megatron's local layers", remedy="")
    """

    part: str
    status: Status
    found: str
    used: str = ""
    """What training uses; with `fallback`, what it uses instead."""
    remedy: str = ""


def exit_code(findings: Iterable[Finding]) -> int:
    """0 when training can run, else 1."""
    return int(any(finding.status == "broken" for finding in findings))


def gigabytes(num_bytes: float) -> str:
    """10^9 bytes, as in `p3o plan`."""
    return f"{num_bytes / 1e9:.1f} GB"
