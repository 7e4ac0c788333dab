"""samples.jsonl: every sample of a run, one JSON object a line.

    {"step": 3, "advantage": 0.71, ...fields of Sample...}

Floats are written so that they read back exactly, so a recording replays bit for bit.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from megatron_p3o.types import Sample


class SampleRecorder:
    """Appends a step's samples, flushed before the step counts as done."""

    def __init__(self, path: Path, *, first_step: int) -> None:
        """
        Args:
            path: the file; records of `first_step` and later, and a half-written last line, are
                dropped, which is what a resumed run needs.
            first_step: the next step that will be written.
        """
        if path.exists():
            _keep_steps_before(path, first_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, samples: Iterable[tuple[Sample, float | None]]) -> None:
        """Samples with their advantages; None for a sample that was left out of the loss."""
        for sample, advantage in samples:
            record = {"step": step, "advantage": advantage, **sample.to_json()}
            self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _keep_steps_before(path: Path, first_step: int) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with path.open(encoding="utf-8") as old, partial.open("w", encoding="utf-8") as kept:
        kept.writelines(
            line for line in old if line.endswith("\n") and json.loads(line)["step"] < first_step
        )
    os.replace(partial, path)
