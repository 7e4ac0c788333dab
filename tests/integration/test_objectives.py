"""Dynamic sampling and a reference model as a user runs them: results, resuming, replay."""

import json
import shutil
from pathlib import Path

import pytest

from megatron_p3o.run_dir import RunDir
from megatron_p3o.trainer.metrics import read_metrics
from tests.integration.commands import p3o, write_run
from tools.make_tiny_model import make_tiny_model

SECTIONS = {
    "objective": {"name": "p4o", "entropy_coefficient": 0.01},
    "reference": {"kl_coefficient": 0.1},
    "train": {
        "steps": 3,
        "prompts_per_step": 2,
        "samples_per_prompt": 4,
        "dynamic_sampling": {"max_rounds": 2},
    },
}


def without_times(records: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in r.items() if not k.startswith("time/")} for r in records]


def test_it_reports_resumes_bitwise_and_replays(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = write_run(tmp_path, tiny_model_dir, **SECTIONS)
    result = p3o("train", str(config), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("warning: objective.name=p4o with") == 1
    run = RunDir(tmp_path / "run")
    records = read_metrics(run.metrics)
    samples = run.samples.read_text()
    assert sum(r["dynamic_sampling/dropped_groups"] for r in records) > 0
    # The policy is its own reference until it has moved.
    assert records[0]["reference/kl"] == pytest.approx(0.0, abs=1e-9)
    assert records[2]["reference/kl"] > 1e-6
    drawn = [json.loads(line)["prompt_id"] for line in samples.splitlines()]
    assert len(set(drawn)) == 3 * 2  # fresh prompts throughout, groups of four

    # Killed after the first step: the rest comes out the same, replacements included.
    for step in (2, 3):
        shutil.rmtree(run.checkpoints / f"step_{step}")
    (run.checkpoints / "latest").write_text("step_1")
    other = tmp_path / "other-model"
    make_tiny_model(other, seed=9)
    refused = p3o(
        "train", str(config), "--resume", "--reference.model_path", str(other), cwd=tmp_path
    )
    assert refused.returncode == 2
    assert "reference differs from the run" in refused.stderr
    result = p3o("train", str(config), "--resume", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert without_times(read_metrics(run.metrics)) == without_times(records)
    assert run.samples.read_text() == samples

    # A replay draws nothing, and takes the same steps.
    rollout = {"engine": "replay", "replay_path": str(run.samples)}
    replayed = {
        **SECTIONS,
        "run": {"dir": str(tmp_path / "replay"), "seed": 3},
        "rollout": rollout,
    }
    refused = p3o("check", str(write_run(tmp_path, tiny_model_dir, **replayed)), cwd=tmp_path)
    assert refused.returncode == 2
    assert "train.dynamic_sampling.max_rounds=2 must be 0" in refused.stderr
    words = ["--train.dynamic_sampling.max_rounds", "0"]
    result = p3o("train", str(tmp_path / "run.yaml"), *words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for got, want in zip(read_metrics(RunDir(tmp_path / "replay").metrics), records, strict=True):
        for name in ("loss/total", "ess/step", "reference/kl", "grad_norm"):
            assert got[name] == want[name], name


def test_a_reference_of_another_vocabulary_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model_dir, other)
    fields = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**fields, "vocab_size": 99}))
    config = write_run(
        tmp_path,
        tiny_model_dir,
        reference={"kl_coefficient": 0.1, "model_path": str(other)},
    )
    result = p3o("check", str(config), cwd=tmp_path)
    assert result.returncode == 2
    assert f"reference.model_path='{other}'" in result.stderr
    config = write_run(
        tmp_path,
        tiny_model_dir,
        reference={"kl_coefficient": 0.1, "model_path": str(tmp_path / "nowhere")},
    )
    result = p3o("check", str(config), cwd=tmp_path)
    assert result.returncode == 2
    assert "reference.model_path=" in result.stderr and "no such directory" in result.stderr
