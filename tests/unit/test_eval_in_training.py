"""Evaluation between training steps: it happens, it is right, and training does not notice."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_p3o.config import parse_config, to_yaml
from megatron_p3o.errors import ConfigurationError
from megatron_p3o.evaluation.items import read_results
from megatron_p3o.trainer.metrics import read_metrics
from tests.unit.test_docs import MINIMAL

# One process for all runs: importing Megatron takes longer than they do.
SCRIPT = """
import os, sys
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
from megatron_p3o.config import load_config
from megatron_p3o.rollout.sglang.cluster import free_ports
from megatron_p3o.trainer.worker import run_rank
for path in sys.argv[1:]:
    os.environ["MASTER_PORT"] = str(free_ports("127.0.0.1", 1)[0])
    run_rank(load_config(path), resume=False)
"""
EVAL = {
    "every": 2,
    "data": {
        "source": "generator",
        "generator": "arithmetic",
        "generator_args": {"max_operand": 3, "template": "{a}{op}{b}="},
        "chat": False,
    },
    "n": 4,
    "k": [1, 4],
    "temperature": 0.7,
    "max_new_tokens": 4,
    "limit": 6,
}


def run_yaml(directory: Path, model: Path, name: str, **sections: dict[str, Any]) -> Path:
    tree: dict[str, dict[str, Any]] = {
        "run": {"dir": str(directory / name), "seed": 3},
        "model": {"path": str(model)},
        "data": {
            "source": "generator",
            "generator": "arithmetic",
            "generator_args": {"max_operand": 2, "template": "{a}{op}{b}="},
            "chat": False,
        },
        "train": {"steps": 3, "prompts_per_step": 3, "samples_per_prompt": 4},
        "optimizer": {"lr": 2e-3},
        "sampling": {"max_new_tokens": 3},
    }
    for section, fields in sections.items():
        tree[section] = {**tree.get(section, {}), **fields}
    path = directory / f"{name}.yaml"
    path.write_text(to_yaml(parse_config(tree)))
    return path


@pytest.fixture(scope="module")
def runs(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    checkpoint = {"checkpoint": {"every": 3}}
    sft = {"objective": {"name": "sft"}, "rollout": {"engine": "answers"}}
    paths = [
        run_yaml(directory, tiny_model_dir, "plain"),
        run_yaml(directory, tiny_model_dir, "evaluated", eval=EVAL, **checkpoint),
        run_yaml(directory, tiny_model_dir, "sft-plain", **sft),
        run_yaml(directory, tiny_model_dir, "sft", eval={**EVAL, "every": 1}, **sft),
        run_yaml(
            directory,
            tiny_model_dir,
            "replayed",
            rollout={"engine": "replay", "replay_path": str(directory / "plain/samples.jsonl")},
            eval={**EVAL, "every": 3},
        ),
    ]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, paths)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "eval/pass_at_1 0." in done.stdout
    return directory


def training(records: list[dict[str, float]]) -> list[dict[str, float]]:
    return [
        {k: v for k, v in record.items() if not k.startswith(("time/", "eval/"))}
        for record in records
    ]


@pytest.mark.parametrize(("plain", "evaluated"), [("plain", "evaluated"), ("sft-plain", "sft")])
def test_training_is_the_same_to_the_last_bit(runs: Path, plain: str, evaluated: str) -> None:
    one, other = (read_metrics(runs / name / "metrics.jsonl") for name in (plain, evaluated))
    assert training(one) == training(other)
    samples = [(runs / name / "samples.jsonl").read_text() for name in (plain, evaluated)]
    assert samples[0] == samples[1]
    assert not any(name.startswith(("eval/", "time/eval")) for record in one for name in record)


def test_it_runs_every_so_often_and_at_the_end(runs: Path) -> None:
    records = read_metrics(runs / "evaluated" / "metrics.jsonl")
    assert ["time/eval_s" in record for record in records] == [False, True, True]
    for record in records[1:]:
        assert {name for name in record if name.startswith("eval/")} == {
            *("eval/reward_mean", "eval/pass_at_1", "eval/pass_at_4", "eval/length_mean"),
            *("eval/truncated_fraction", "eval/failed_fraction"),
        }
        assert 0 <= record["eval/pass_at_1"] <= record["eval/pass_at_4"] <= 1
        assert record["eval/pass_at_1"] == record["eval/reward_mean"]
        assert record["eval/length_mean"] <= 4
    assert all("eval/pass_at_1" in r for r in read_metrics(runs / "sft" / "metrics.jsonl"))


def test_a_replayed_run_trains_to_the_same_model(runs: Path) -> None:
    """Evaluated by an engine of its own, it gives what the run with the shared engine gave."""
    last, replayed = (
        read_metrics(runs / name / "metrics.jsonl")[-1] for name in ("evaluated", "replayed")
    )
    names = [name for name in last if name.startswith("eval/")]
    assert {name: last[name] for name in names} == {name: replayed[name] for name in names}


def test_the_command_finds_the_same_of_the_checkpoint(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_p3o import cli

    words = ["p3o", "eval", str(runs / "evaluated"), "--n", "4", "--k", "1,4"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    _, summary = read_results(runs / "evaluated" / "eval" / "step_3")
    last = read_metrics(runs / "evaluated" / "metrics.jsonl")[-1]
    assert summary["num_prompts"] == 6
    assert summary["pass_at_k"]["1"]["value"] == pytest.approx(last["eval/pass_at_1"])
    assert summary["pass_at_k"]["4"]["value"] == pytest.approx(last["eval/pass_at_4"])
    assert summary["length"]["mean"] == pytest.approx(last["eval/length_mean"])


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"eval": {"k": [1, 8]}}, r"eval.k=\[1, 8\] must be at most eval.n=4"),
        ({"eval": {"k": []}}, "eval.k="),
        ({"eval": {"data": {"source": "jsonl"}}}, "eval.data: data.path is needed"),
        (
            {"eval": {"every": 1}, "rollout": {"engine": "sglang", "servers": ["http://a:1"]}},
            "eval.every=1 needs an engine in the trainer's process",
        ),
    ],
)
def test_bad_sections(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_config({**json.loads(json.dumps(MINIMAL)), **sections})
