"""Training as a user starts it: results, resuming, replay, and failures while running."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_p3o.run_dir import RunDir
from megatron_p3o.trainer.metrics import read_metrics
from tests.conftest import ROOT
from tests.integration.commands import command, p3o, write_run

KEYS = {
    "step",
    "weight_version",
    *("reward/mean", "reward/std", "response/length_mean", "response/truncated_fraction"),
    *("advantage/zero_variance_fraction", "ess/step", "ess/drift", "ess/mismatch"),
    *("ratio/mean", "ratio/std", "ratio/max", "mismatch/k3", "mismatch/abs_logprob_mean"),
    *("p3o/cap_fraction", "loss/total", "loss/score", "loss/kl", "entropy/mean", "grad_norm", "lr"),
    *("staleness/mean", "staleness/max", "tokens/response"),
    *(f"time/{phase}_s" for phase in ("step", "rollout", "score", "train", "sync")),
}


def without_times(records: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in r.items() if not k.startswith("time/")} for r in records]


def documented_metrics() -> set[str]:
    """The names in the first columns of the tables of docs/metrics.md."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", page, re.M)
    return {name for row in rows for name in re.findall(r"`([a-z0-9_/]+)`", row)}


@pytest.fixture(scope="module")
def finished(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with run.yaml and the run dir of four finished steps."""
    directory = tmp_path_factory.mktemp("finished")
    result = p3o("train", str(write_run(directory, tiny_model_dir)), cwd=directory)
    assert result.returncode == 0, result.stderr
    assert "step 4/4  reward" in result.stdout
    assert "curves" in result.stdout
    return directory


def test_a_run_leaves_what_the_design_names(finished: Path) -> None:
    run = RunDir(finished / "run")
    records = read_metrics(run.metrics)
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert [record["weight_version"] for record in records] == [0, 1, 2, 3]
    for record in records:
        assert KEYS <= set(record) <= documented_metrics()
        # Trainer and embedded engine compute the same fp32 log-probs, and nothing is stale.
        assert record["mismatch/abs_logprob_mean"] < 1e-5
        assert record["ess/step"] == pytest.approx(1.0, abs=1e-6)
        assert record["staleness/max"] == 0
    assert records[1]["lr"] == pytest.approx(2e-3)  # warm-up over two steps
    assert records[3]["lr"] == pytest.approx(0.0, abs=1e-9)  # cosine to min_lr at the end
    assert run.config.exists()
    assert run.curves.read_bytes().startswith(b"\x89PNG")
    assert run.latest_checkpoint().name == "step_4"
    samples = [json.loads(line) for line in run.samples.read_text().splitlines()]
    assert len(samples) == 4 * 4 * 4
    assert {sample["weight_version_min"] for sample in samples} == {0, 1, 2, 3}
    first = [s for s in samples if s["step"] == 0]
    assert records[0]["reward/mean"] == pytest.approx(sum(s["reward"] for s in first) / 16)


def test_resuming_is_bitwise(finished: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    directory = tmp_path / "again"
    shutil.copytree(finished, directory)
    run = RunDir(directory / "run")
    # As if the run had been killed after step 2's checkpoint and some later output.
    for step in (3, 4):
        shutil.rmtree(run.checkpoints / f"step_{step}")
    (run.checkpoints / "latest").write_text("step_2")
    with run.metrics.open("a") as file:
        file.write('{"step": 4, "rew')
    config = write_run(directory, tiny_model_dir)
    result = p3o("train", str(config), "--resume", cwd=directory)
    assert result.returncode == 0, result.stderr
    reference = RunDir(finished / "run")
    assert without_times(read_metrics(run.metrics)) == without_times(
        read_metrics(reference.metrics)
    )
    assert run.samples.read_text() == reference.samples.read_text()
    assert_same_tensors(run.latest_checkpoint(), reference.latest_checkpoint())


def assert_same_tensors(one: Path, other: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    reader_one, reader_other = FileSystemReader(one), FileSystemReader(other)
    names = set(reader_one.read_metadata().state_dict_metadata)
    assert names == set(reader_other.read_metadata().state_dict_metadata)
    tensors_one, tensors_other = load_tensors(one), load_tensors(other)
    assert any("exp_avg" in name for name in tensors_one)
    for name, tensor in tensors_one.items():
        assert torch.equal(tensor, tensors_other[name]), name


def load_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(item.size, dtype=item.properties.dtype)
        for name, item in metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=str(checkpoint), no_dist=True)
    return tensors


def test_a_finished_run_is_shown_again(finished: Path) -> None:
    before = (finished / "run" / "metrics.jsonl").read_text()
    result = p3o("train", str(finished / "run.yaml"), "--resume", cwd=finished)
    assert result.returncode == 0, result.stderr
    assert "has finished all 4 steps" in result.stdout
    assert (finished / "run" / "metrics.jsonl").read_text() == before


def test_replay_gives_the_recorded_run_again(
    finished: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = write_run(
        tmp_path,
        tiny_model_dir,
        rollout={"engine": "replay", "replay_path": str(finished / "run" / "samples.jsonl")},
        checkpoint={"every": 0},
    )
    result = p3o("train", str(config), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert without_times(read_metrics(tmp_path / "run" / "metrics.jsonl")) == without_times(
        read_metrics(finished / "run" / "metrics.jsonl")
    )


def test_same_samples_on_another_layout(
    finished: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = write_run(
        tmp_path,
        tiny_model_dir,
        layout={"tensor": 2, "data": 1},
        train={"steps": 1, "prompts_per_step": 4, "samples_per_prompt": 4},
    )
    result = p3o("train", str(config), cwd=tmp_path)
    assert result.returncode == 0, result.stderr

    def responses(path: Path) -> list[tuple[str, int, list[int]]]:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        return [
            (r["prompt_id"], r["sample_index"], r["response_ids"])
            for r in records
            if r["step"] == 0
        ]

    assert responses(tmp_path / "run" / "samples.jsonl") == responses(
        finished / "run" / "samples.jsonl"
    )


def test_a_killed_rank_ends_the_run_and_the_run_goes_on(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = write_run(tmp_path, tiny_model_dir, train={"steps": 400, "prompts_per_step": 4})
    process = subprocess.Popen(
        command("train", str(config)),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    run = RunDir(tmp_path / "run")
    deadline = time.monotonic() + 120
    while not (run.checkpoints / "step_2").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    victim = ranks_of(process.pid)[-1]
    os.kill(victim, signal.SIGKILL)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "was ended by SIGKILL" in stderr
    assert "--resume" in stderr
    assert ranks_of(process.pid) == []
    done = len(read_metrics(run.metrics))
    latest = int(run.latest_checkpoint().name.removeprefix("step_"))
    assert done - 1 <= latest <= done
    steps = latest + 2
    result = p3o("train", str(config), "--resume", "--train.steps", str(steps), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert [r["step"] for r in read_metrics(run.metrics)] == list(range(steps))


def test_ranks_end_with_a_killed_launcher(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = write_run(tmp_path, tiny_model_dir, train={"steps": 400, "prompts_per_step": 4})
    process = subprocess.Popen(
        command("train", str(config)),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    run = RunDir(tmp_path / "run")
    deadline = time.monotonic() + 120
    while not run.metrics.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < deadline, "ranks outlive their launcher"
        time.sleep(0.1)


def ranks_of(parent: int) -> list[int]:
    """Rank processes that a launcher started, by their command line."""
    found = subprocess.run(
        ["pgrep", "-P", str(parent), "-f", "megatron_p3o.cli"], capture_output=True, text=True
    )
    return [int(line) for line in found.stdout.split()]


def test_a_full_disk_is_one_message(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = write_run(tmp_path, tiny_model_dir, checkpoint={"every": 0}, train={"steps": 40})
    limited = ["bash", "-c", 'ulimit -f 8 && exec "$@"', "bash"]  # no file above 8 KiB
    result = subprocess.run(
        [*limited, *command("train", str(config))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    assert "cannot be written (File too large); make room, then: no checkpoint was" in result.stderr
    assert "Traceback" not in result.stderr
    assert read_metrics(RunDir(tmp_path / "run").metrics)[0]["step"] == 0


def test_nan_weights_stop_every_rank_with_a_name(tiny_model_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    result = p3o("train", str(write_run(tmp_path, model)), cwd=tmp_path)
    assert result.returncode == 1
    assert "NaN at weight version 0" in result.stderr
    assert "sample 0" in result.stderr and "position 0" in result.stderr
    assert "Traceback" not in result.stderr


REWARDS = """
import time

def sometimes(prompt, response, answer):
    if prompt.startswith("0"):
        raise KeyError("no verdict")
    return float(len(response))

def never(prompt, response, answer):
    time.sleep(60)
"""


def test_failed_rewards_are_counted_and_left_out(tiny_model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    config = write_run(
        tmp_path,
        tiny_model_dir,
        data={
            "shuffle": False,
            "reward": {"name": "my_rewards:sometimes", "max_failure_fraction": 0.75},
        },
        train={"steps": 1, "prompts_per_step": 4},
        checkpoint={"every": 0},
    )
    result = p3o("train", str(config), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (record,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    # Prompts 0+0=, 0+1=, 0+2= fail, 1+0= does not.
    assert record["reward/failed_fraction"] == pytest.approx(0.75)
    samples = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    failed = [json.loads(line) for line in samples if json.loads(line)["reward"] is None]
    assert len(failed) == 12
    assert all("KeyError" in sample["reward_error"] for sample in failed)
    assert all(sample["advantage"] is None for sample in failed)


def test_too_many_failed_rewards_stop_the_run(tiny_model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    reward = {"name": "my_rewards:never", "timeout_s": 0.2, "max_failure_fraction": 0.5}
    config = write_run(tmp_path, tiny_model_dir, data={"reward": reward})
    result = p3o("train", str(config), cwd=tmp_path)
    assert result.returncode == 1
    assert "max_failure_fraction" in result.stderr
    assert "Traceback" not in result.stderr
