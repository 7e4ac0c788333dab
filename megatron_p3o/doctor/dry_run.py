"""One step of a run, in a temporary directory that is removed afterwards."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_p3o.config import RunConfig
from megatron_p3o.doctor.findings import Finding
from megatron_p3o.doctor.system import run_program

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_SHOWN_LINES = 40


def dry_run_words(
    config: RunConfig, path: str, overrides: Sequence[str], directory: Path
) -> list[str]:
    """The command. Later overrides win.

    Args:
        config: of the run, overrides included.
        path: RUN.yaml.
        overrides: as the user gave them.
        directory: that all files go to.
    """
    words = [
        *(sys.executable, "-m", "megatron_p3o.cli", "train", path, *overrides),
        *("--run.dir", str(directory / "run"), "--train.steps", "1", "--checkpoint.every", "0"),
        *("--run.tensorboard", "false"),
    ]
    if config.optimizer.warmup_steps:  # must be shorter than the run
        words += ["--optimizer.warmup_steps", "0"]
    if config.rollout.publish.directory is not None:
        words += ["--rollout.publish.directory", str(directory / "weights")]
    return words


def dry_run(
    config: RunConfig, path: str, overrides: Sequence[str], timeout_s: float
) -> tuple[Finding, str]:
    """Whether one step ends well, and the last lines of what was said when it does not."""
    with tempfile.TemporaryDirectory(prefix="p3o-doctor-") as directory:
        words = dry_run_words(config, path, overrides, Path(directory))
        ran = run_program(words, timeout_s, without=_RANK_VARIABLES)
    if ran.code == 0:
        return Finding(part="dry run", status="ok", found="one step, in a temporary run dir"), ""
    output = (ran.stdout + ran.stderr).strip().splitlines()[-_SHOWN_LINES:]
    how = "was ended" if ran.code is None else f"ended with {ran.code}"
    return Finding(
        part="dry run",
        status="broken",
        found=f"{how}: {output[-1][:300] if output else 'no output'}",
        remedy="see its output below",
    ), "\n".join(output)
