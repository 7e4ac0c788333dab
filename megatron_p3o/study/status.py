"""<study.dir>/status.jsonl: a line when the study starts a run, and one when that run has ended."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STATUS_FILE = "status.jsonl"
# What the messages of `errors.NonFiniteError` speak of.
_NONFINITE = re.compile(r"non-finite|\bnan\b|\binf\b|\binfinit|\bunderflow", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One start of a run, and how it ended.

    Example:
        Attempt(arm="grpo__exact", seed=0, exit_code=1, seconds=12.5, message="p3o: ...")
    """

    arm: str
    seed: int
    exit_code: int | None
    """0 when the run has all its steps; None when it has not ended, or was interrupted."""
    seconds: float
    message: str
    """The last words of a run that failed; empty else."""

    @property
    def has_failed(self) -> bool:
        return self.exit_code is not None and self.exit_code != 0

    @property
    def is_nonfinite(self) -> bool:
        """Whether the run stopped at a NaN or infinity: starting it again would not help."""
        return (
            self.exit_code == 1
            and self.message.startswith("p3o: ")
            and _NONFINITE.search(self.message) is not None
        )


def append_status(study_dir: Path, attempt: Attempt) -> None:
    """Add a line. One write: lines of several processes do not mix."""
    with (study_dir / STATUS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(attempt)) + "\n")


def read_status(study_dir: Path) -> dict[tuple[str, int], Attempt]:
    """(arm, seed) -> its last attempt; lines that cannot be read are left out."""
    path = study_dir / STATUS_FILE
    found: dict[tuple[str, int], Attempt] = {}
    if not path.is_file():
        return found
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        attempt = _parse(line)
        if attempt is not None:
            found[attempt.arm, attempt.seed] = attempt
    return found


def last_words(log: str) -> str:
    """What a failed run said: from its last line that begins with `p3o: ` on, else its last line.

    Args:
        log: what the run printed.
    """
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    for index in range(len(lines) - 1, -1, -1):
        if lines[index].startswith("p3o: "):
            return " ".join(lines[index : index + 5])
    return lines[-1] if lines else ""


def _parse(line: str) -> Attempt | None:
    try:
        tree: Any = json.loads(line)
    except json.JSONDecodeError:
        return None
    kinds: Mapping[str, tuple[type, ...]] = {
        "arm": (str,),
        "seed": (int,),
        "exit_code": (int, type(None)),
        "seconds": (int, float),
        "message": (str,),
    }
    if not isinstance(tree, Mapping) or tree.keys() != kinds.keys():
        return None
    if not all(isinstance(tree[name], kind) for name, kind in kinds.items()):
        return None
    return Attempt(**tree)
