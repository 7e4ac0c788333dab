"""Where a run keeps its files. Imports no torch, so that study tools and the launcher can use it.

<dir>/config.yaml                   the resolved configuration
<dir>/metrics.jsonl                 one JSON object a step
<dir>/samples.jsonl                 one JSON object a sample, with run.record
<dir>/curves.png                    drawn when the run ends
<dir>/checkpoints/step_<N>/         a complete checkpoint after N steps
<dir>/checkpoints/latest            text: the name of the newest complete checkpoint
<dir>/wandb_id, <dir>/mlflow_id     text: the run's id there, with logging.wandb, logging.mlflow
<dir>/wandb/                        wandb's own files
<dir>/servers/                      logs of the rollout servers that the run started
<dir>/eval/<name>/                  what `p3o eval` found of a checkpoint
<dir>/weights/version_<N>/          the weights published last, with rollout.publish.transport=disk
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_p3o.errors import InputError


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run; nothing is created or read until asked for."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.root / "samples.jsonl"

    @property
    def curves(self) -> Path:
        return self.root / "curves.png"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def wandb(self) -> Path:
        """Where wandb, told to use the run dir, keeps its files."""
        return self.root / "wandb"

    @property
    def wandb_id(self) -> Path:
        return self.root / "wandb_id"

    @property
    def mlflow_id(self) -> Path:
        return self.root / "mlflow_id"

    @property
    def servers(self) -> Path:
        return self.root / "servers"

    @property
    def evaluations(self) -> Path:
        return self.root / "eval"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def exists(self) -> bool:
        """Whether something is there that a fresh run would overwrite."""
        return self.root.exists() and (not self.root.is_dir() or any(self.root.iterdir()))

    def latest_checkpoint(self) -> Path:
        """Directory of the newest complete checkpoint.

        Raises:
            InputError: there is none.
        """
        pointer = self.checkpoints / "latest"
        if not pointer.is_file():
            raise InputError(
                f"run.dir={str(self.root)!r} holds no complete checkpoint to resume from; remove "
                "it and start again, and set checkpoint.every to be able to resume"
            )
        directory = self.checkpoints / pointer.read_text(encoding="utf-8").strip()
        if not trainer_state_path(directory).is_file():
            raise InputError(
                f"{str(pointer)!r} names {directory.name!r}, which is not a complete checkpoint; "
                "write the name of a complete step_<N> directory into it"
            )
        return directory


def trainer_state_path(checkpoint: Path) -> Path:
    return checkpoint / "trainer.json"


def read_trainer_state(checkpoint: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint: step, weight version, data cursor, identity of the inputs."""
    return json.loads(trainer_state_path(checkpoint).read_text(encoding="utf-8"))


def parse_record(line: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl or samples.jsonl; None where it is no JSON object with a step."""
    try:
        record = json.loads(line)
    except ValueError:  # no JSON, or no UTF-8
        return None
    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        return None
    return record


def replace_text(path: Path, text: str) -> None:
    """Write a file so that it is seen whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
