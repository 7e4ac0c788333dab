"""Studies and run dirs made up for tests."""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from megatron_p3o.config import parse_config, to_yaml

BASE: Mapping[str, Any] = {
    "run": {"dir": "elsewhere", "seed": 7},
    "model": {"path": "models/x"},
    "data": {"source": "generator", "generator": "arithmetic"},
    "train": {"steps": 4, "prompts_per_step": 1, "samples_per_prompt": 2},
}
OBJECTIVES: Mapping[str, Any] = {
    "p3o": {"objective.name": "p3o"},
    "grpo": {"objective.name": "grpo", "objective.clip_high": 0.3},
}


def write_study(
    directory: Path,
    axes: Mapping[str, Any],
    *,
    seeds: Sequence[int] = (0,),
    base: Mapping[str, Any] = BASE,
    **sections: Any,
) -> Path:
    """A STUDY.yaml of one grid, with its base, that writes to `<directory>/out`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "run.yaml").write_text(yaml.safe_dump(deepcopy(dict(base))))
    path = directory / "STUDY.yaml"
    tree = {
        "study": {"dir": str(directory / "out"), "base": "run.yaml", "seeds": list(seeds)},
        "grids": [{"axes": axes}],
        **sections,
    }
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def write_run(
    root: Path,
    rewards: Sequence[float],
    *,
    fields: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Sequence[float]] | None = None,
    steps: int | None = None,
    seed: int = 0,
) -> Path:
    """A run dir of a run with these rewards.

    Args:
        root: the run dir.
        rewards: one a step.
        fields: sections that replace those of BASE.
        metrics: more curves, each as long as `rewards`.
        steps: train.steps; as many as there are rewards if left out.
        seed: run.seed.
    """
    root.mkdir(parents=True)
    tree = {**deepcopy(dict(BASE)), **(fields or {})}
    tree["run"] = {"dir": str(root), "seed": seed}
    tree["train"] = {**tree["train"], "steps": steps or len(rewards)}
    (root / "config.yaml").write_text(to_yaml(parse_config(tree)))
    lines = []
    for step, reward in enumerate(rewards):
        more = {name: values[step] for name, values in (metrics or {}).items()}
        lines.append(json.dumps({"step": step, "reward/mean": reward, **more}) + "\n")
    (root / "metrics.jsonl").write_text("".join(lines))
    return root
