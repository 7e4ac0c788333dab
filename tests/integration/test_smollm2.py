"""The real 135M language model through the real commands, small enough for a test."""

import json
from pathlib import Path

import pytest

from megatron_p3o.trainer.metrics import read_metrics
from tests.conftest import ROOT
from tests.integration.commands import p3o

SMALL = (
    *("--train.steps", "2", "--train.prompts_per_step", "2", "--train.samples_per_prompt", "4"),
    *("--checkpoint.every", "0"),
)


def train(run_dir: Path, model_dir: Path, *words: str) -> list[dict[str, float]]:
    config = ROOT / "examples" / "quickstart" / "run.yaml"
    result = p3o(
        *("train", str(config), "--run.dir", str(run_dir), "--model.path", str(model_dir)),
        *SMALL,
        *words,
        cwd=run_dir.parent,
    )
    assert result.returncode == 0, result.stderr
    return read_metrics(run_dir / "metrics.jsonl")


def test_quickstart_and_its_replay_under_tensor_parallelism(
    smollm2_dir: Path, tmp_path: Path
) -> None:
    recorded = train(tmp_path / "recorded", smollm2_dir)
    for record in recorded:
        # The trainer's log-probs are the embedded engine's, before and after an update.
        assert record["mismatch/abs_logprob_mean"] < 1e-5
        assert record["ess/step"] == pytest.approx(1, abs=1e-6)
        assert record["response/length_mean"] > 1
    path = tmp_path / "recorded" / "samples.jsonl"
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(samples) == 16
    # A chat prompt without a system turn, and answers that are mostly digits.
    assert all(sample["prompt_text"].startswith("What is ") for sample in samples)
    assert sum(any(c.isdigit() for c in s["response_text"]) for s in samples) > 8

    # 9 heads and 3 KV heads: the layout a person with three cards would choose.
    replayed = train(
        tmp_path / "replayed",
        smollm2_dir,
        *("--rollout.engine", "replay", "--rollout.replay_path", str(path)),
        *("--layout.tensor", "3", "--layout.data", "1"),
        *("--train.microbatch_size", "4", "--train.scoring", "separate"),
    )
    for ours, theirs in zip(replayed, recorded, strict=True):
        for name in ("loss/total", "loss/score", "ess/step", "ratio/mean", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
