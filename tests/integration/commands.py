"""Run `p3o` as a user does: a process with arguments, an exit code, two streams."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

TIMEOUT_S = 180.0


def p3o(
    *words: str, cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run to the end."""
    return subprocess.run(
        command(*words),
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "megatron_p3o.cli", *words]


def write_run(directory: Path, model_dir: Path, **sections: dict) -> Path:
    """A RUN.yaml for the tiny model: short, two ranks, checkpoints; `sections` change fields."""
    tree: dict[str, dict] = {
        "run": {"dir": str(directory / "run"), "seed": 3},
        "model": {"path": str(model_dir)},
        "data": {
            "source": "generator",
            "generator": "arithmetic",
            "generator_args": {"max_operand": 2, "template": "{a}{op}{b}="},
            "chat": False,
        },
        "layout": {"data": 2},
        "train": {
            "steps": 4,
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "microbatch_size": 3,
        },
        "optimizer": {"lr": 2e-3, "schedule": "cosine", "warmup_steps": 2},
        "sampling": {"max_new_tokens": 3},
        "checkpoint": {"every": 1, "keep": 9},
    }
    for name, fields in sections.items():
        tree[name] = {**tree.get(name, {}), **fields}
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
