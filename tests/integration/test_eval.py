"""Evaluation as a user starts it: in a run of two ranks, and of its checkpoint afterwards."""

import json
from pathlib import Path

import pytest

from megatron_p3o.trainer.metrics import read_metrics
from tests.integration.commands import p3o, write_run


def test_ranks_share_the_prompts(tiny_model_dir: Path, tmp_path: Path) -> None:
    section = {"every": 2, "n": 4, "k": [1, 2], "limit": 7}
    config = write_run(
        tmp_path, tiny_model_dir, train={"steps": 2}, checkpoint={"every": 2}, eval=section
    )
    trained = p3o("train", str(config), cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    found = p3o("eval", "run", "--n", "4", "--k", "1,2", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    summary = json.loads((tmp_path / "run" / "eval" / "step_2" / "summary.json").read_text())
    first, last = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert "eval/pass_at_1" not in first
    assert summary["num_prompts"] == 7
    for k in ("1", "2"):
        value = summary["pass_at_k"][k]["value"]
        assert last[f"eval/pass_at_{k}"] == pytest.approx(value)
    assert last["eval/length_mean"] == pytest.approx(summary["length"]["mean"])
