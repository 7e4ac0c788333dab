"""Trackers: what they are sent, that their failures never reach a run, that resumes go on."""

import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_p3o.config import RunConfig, parse_config
from megatron_p3o.errors import ConfigurationError
from megatron_p3o.preflight import _check_trackers
from megatron_p3o.run_dir import RunDir
from megatron_p3o.trainer.background import BackgroundSink
from megatron_p3o.trainer.metrics import read_metrics
from megatron_p3o.trainer.sinks import open_sinks

STEP = {"reward/mean": 0.5, "alarm": "ESS is low"}

# Stand-ins that write down each call, and have the signatures that the real packages document.
WANDB = """
import json, pathlib
LOG = pathlib.Path(__file__).with_name("wandb.jsonl")
def note(name, /, **words):
    with LOG.open("a") as file:
        file.write(json.dumps([name, words]) + "\\n")
class Run:
    def log(self, data, step=None):
        note("log", data=data, step=step)
    def finish(self, exit_code=None):
        note("finish")
def init(entity=None, project=None, dir=None, id=None, name=None, config=None, group=None,
         mode=None, resume=None):
    note("init", entity=entity, project=project, dir=dir, id=id, name=name, config=config,
         group=group, mode=mode, resume=resume)
    return Run()
"""
MLFLOW = """
import json, pathlib, threading, types
LOG = pathlib.Path(__file__).with_name("mlflow.jsonl")
def note(name, /, **words):
    with LOG.open("a") as file:
        file.write(json.dumps([name, words]) + "\\n")
ACTIVE = threading.local()
def set_tracking_uri(uri):
    note("set_tracking_uri", uri=uri)
def set_experiment(experiment_name=None, experiment_id=None):
    note("set_experiment", experiment_name=experiment_name)
def start_run(run_id=None, experiment_id=None, run_name=None):
    note("start_run", run_id=run_id, run_name=run_name)
    ACTIVE.id = run_id or "made-here"
    return types.SimpleNamespace(info=types.SimpleNamespace(run_id=ACTIVE.id))
def log_params(params):
    note("log_params", run=ACTIVE.id, params=params)
def log_metrics(metrics, step=None):
    note("log_metrics", run=ACTIVE.id, metrics=metrics, step=step)
def end_run(status="FINISHED"):
    note("end_run", run=ACTIVE.id)
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on sys.path with both stand-ins."""
    directory = tmp_path / "packages"
    directory.mkdir()
    (directory / "wandb.py").write_text(WANDB)
    (directory / "mlflow.py").write_text(MLFLOW)
    monkeypatch.syspath_prepend(str(directory))
    for name in ("wandb", "mlflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield directory
    for name in ("wandb", "mlflow"):
        sys.modules.pop(name, None)


def calls(log: Path) -> list[tuple[str, dict[str, Any]]]:
    return [(name, words) for name, words in map(json.loads, log.read_text().splitlines())]


def config_with(root: Path, **sections: Any) -> RunConfig:
    return parse_config(
        {
            "run": {"dir": str(root)},
            "model": {"path": "models/m"},
            "data": {"source": "generator", "generator": "arithmetic"},
            "train": {"steps": 12, "prompts_per_step": 8, "samples_per_prompt": 8},
            **sections,
        }
    )


def run_steps(config: RunConfig, first: int, stop: int) -> None:
    """What the trainer does with sinks, from its first step to its end."""
    run_dir = RunDir(Path(config.run.dir))
    run_dir.root.mkdir(exist_ok=True)
    sinks = open_sinks(config, run_dir, first_step=first)
    for step in range(first, stop):
        for sink in sinks:
            sink.write(step, STEP)
    for sink in sinks:
        sink.close()


def test_wandb_is_told_of_the_run_and_a_resume_goes_on_with_it(
    packages: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    section = {"project": "rl", "mode": "offline", "group": "a"}
    config = config_with(root, logging={"wandb": section})
    run_steps(config, 0, 2)
    identity = (root / "wandb_id").read_text().strip()
    assert len(identity) == 16
    first = calls(packages / "wandb.jsonl")
    assert [name for name, _ in first] == ["init", "log", "log", "finish"]
    assert first[0][1] == {
        "project": "rl",
        "entity": None,
        "name": str(root),
        "group": "a",
        "mode": "offline",
        "dir": str(root),
        "config": config.model_dump(mode="json"),
        "resume": "allow",
        "id": identity,
    }
    assert first[2][1] == {"data": STEP, "step": 1}
    run_steps(config, 2, 3)
    again = calls(packages / "wandb.jsonl")[len(first) :]
    assert [name for name, _ in again] == ["init", "log", "finish"]
    assert again[0][1]["id"] == identity
    assert again[1][1]["step"] == 2


def test_mlflow_is_told_of_the_run_and_a_resume_goes_on_with_it(
    packages: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    section = {"tracking_uri": "file:mlruns", "experiment": "rl", "run_name": "first"}
    config = config_with(root, logging={"mlflow": section})
    run_steps(config, 0, 1)
    log = packages / "mlflow.jsonl"
    first = calls(log)
    assert [first[index] for index in (0, 1, 2, 4, 5)] == [
        ("set_tracking_uri", {"uri": "file:mlruns"}),
        ("set_experiment", {"experiment_name": "rl"}),
        ("start_run", {"run_id": None, "run_name": "first"}),
        ("log_metrics", {"run": "made-here", "metrics": {"reward/mean": 0.5}, "step": 0}),
        ("end_run", {"run": "made-here"}),
    ]
    name, words = first[3]
    assert (name, words["params"]["train.steps"]) == ("log_params", 12)
    assert words["params"]["logging.mlflow.run_name"] == "first"
    assert (root / "mlflow_id").read_text() == "made-here\n"
    (root / "mlflow_id").write_text("of-before\n")
    run_steps(config, 1, 2)
    again = calls(log)[len(first) :]
    assert [name for name, _ in again] == [
        *("set_tracking_uri", "set_experiment", "start_run", "log_metrics", "end_run")
    ]
    assert again[2][1] == {"run_id": "of-before", "run_name": None}
    assert again[3][1]["run"] == "of-before"


def test_a_tracker_that_fails_leaves_the_run_alone(
    packages: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (packages / "wandb.py").write_text("def init(**words):\n    raise RuntimeError('no login')\n")
    root = tmp_path / "run"
    with caplog.at_level(logging.WARNING, "megatron_p3o"):
        run_steps(config_with(root, logging={"wandb": {"project": "rl"}}), 0, 5)
    assert [line["step"] for line in read_metrics(root / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    first, last = [record.message for record in caplog.records]
    assert first.startswith("logging.wandb: opening failed: RuntimeError('no login'); training go")
    assert "wandb login" in first
    assert last.startswith("logging.wandb: switched off after 3 failures in a row")


class Scripted:
    """Fails on the steps it is told to."""

    def __init__(self, failing: set[int]) -> None:
        self.failing, self.seen, self.closed = failing, list[int](), False
        self.threads = {threading.get_ident()}

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        self.threads.add(threading.get_ident())
        self.seen.append(step)
        if step in self.failing:
            raise ConnectionError(f"step {step}")

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.closed = True


@pytest.mark.parametrize(
    ("failing", "seen", "is_off"),
    [
        (set(), [0, 1, 2, 3, 4, 5], False),
        ({1, 2, 4, 5}, [0, 1, 2, 3, 4, 5], False),  # never three in a row
        ({1, 2, 3}, [0, 1, 2, 3], True),
    ],
)
def test_three_failures_in_a_row_switch_a_sink_off(
    failing: set[int], seen: list[int], is_off: bool, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Scripted] = []

    def make() -> Scripted:
        made.append(Scripted(failing))
        return made[0]

    with caplog.at_level(logging.WARNING, "megatron_p3o"):
        sink = BackgroundSink("x", make, remedy="Look.")
        for step in range(6):
            sink.write(step, STEP)
        sink.close()
    assert (made[0].seen, made[0].closed, sink.is_off) == (seen, True, is_off)
    assert len(made[0].threads) == 1 and threading.get_ident() not in made[0].threads
    warned = [record.message for record in caplog.records]
    assert len(warned) == bool(failing) + is_off


def test_a_sink_that_could_not_be_opened_is_opened_with_the_next_step() -> None:
    sinks: list[Scripted] = []
    errors: list[Exception] = [OSError("not yet"), OSError("not yet")]

    def make() -> Scripted:
        if errors:
            raise errors.pop()
        sinks.append(Scripted(set()))
        return sinks[0]

    sink = BackgroundSink("x", make, remedy="Look.")
    for step in range(3):
        sink.write(step, STEP)
    sink.close()
    assert [each.seen for each in sinks] == [[1, 2]]


def held(gate: threading.Event, sink: Scripted) -> Callable[[], Scripted]:
    def make() -> Scripted:
        gate.wait(30)
        return sink

    return make


def test_a_slow_sink_drops_what_does_not_fit_and_counts_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate, inner = threading.Event(), Scripted(set())
    with caplog.at_level(logging.WARNING, "megatron_p3o"):
        sink = BackgroundSink("x", held(gate, inner), remedy="Look.", waiting_steps=2)
        for step in range(5):
            sink.write(step, STEP)
        gate.set()
        sink.close()
    assert (inner.seen, sink.num_dropped, inner.closed) == ([0, 1], 3, True)
    assert [record.message.split(";")[0] for record in caplog.records] == [
        "x: 2 steps wait to be sent, so step 2 and others may be dropped",
        "x: 3 steps were dropped",
    ]


def test_a_hanging_sink_does_not_hold_the_end_of_a_run(caplog: pytest.LogCaptureFixture) -> None:
    gate, inner = threading.Event(), Scripted(set())
    with caplog.at_level(logging.WARNING, "megatron_p3o"):
        sink = BackgroundSink("x", held(gate, inner), remedy="Look.", close_s=0.2)
        sink.write(0, STEP)
        sink.close()
    assert "still busy" in caplog.records[0].message
    gate.set()


def test_a_failing_metrics_jsonl_stops_the_run(tmp_path: Path) -> None:
    config = config_with(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (sink,) = open_sinks(config, RunDir(tmp_path / "run"), first_step=0)
    sink.close()
    with pytest.raises(ValueError, match="closed file"):
        sink.write(0, STEP)


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("wandb", {"project": "rl"}),
        ("mlflow", {"tracking_uri": "file:x", "experiment": "rl"}),
    ],
)
def test_a_missing_package_is_refused_before_the_run(
    name: str, section: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory of that name, as wandb leaves one, is no package."""
    config = config_with(tmp_path / "run", logging={name: section})
    (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ConfigurationError, match=rf"pip install 'megatron-p3o\[{name}\]', or rem"):
        _check_trackers(config)
    (tmp_path / f"{name}.py").write_text("")
    (tmp_path / name).rmdir()
    sys.path_importer_cache.pop(str(tmp_path), None)
    _check_trackers(config)


def test_a_tracker_needs_its_fields(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"logging\.wandb\.project"):
        config_with(tmp_path, logging={"wandb": {"entity": "us"}})
