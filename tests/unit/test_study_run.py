"""p3o study run: processes that write run dirs, fail, are killed, and are gone on with."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_p3o.algorithms import EssSums
from megatron_p3o.cli import app
from megatron_p3o.config import load_config
from megatron_p3o.errors import ConfigurationError, InputError, NonFiniteError
from megatron_p3o.study.arms import Plan, load_plan
from megatron_p3o.study.runner import Action, Outcome, check_plan, run_all, select, write_plan
from megatron_p3o.study.status import Attempt, last_words, read_status
from tests.unit.studies import OBJECTIVES, write_run, write_study

# Stands for `p3o train`: what it does is said by data.generator_args.act. Step k has reward k.
FAKE_TRAIN = """
import json, os, pathlib, signal, sys, time, yaml
words = sys.argv[1:]
text = pathlib.Path(words[0]).read_text()
config = yaml.safe_load(text)
root = pathlib.Path(config["run"]["dir"])
act = config["data"]["generator_args"].get("act", "finish")
resumed = "--resume" in words
assert resumed == root.exists(), (resumed, root)
root.mkdir(exist_ok=True)
(root / "config.yaml").write_text(text)
(root / "checkpoints").mkdir(exist_ok=True)
print("words", json.dumps(words[1:]), os.environ["OMP_NUM_THREADS"])
first = len((root / "metrics.jsonl").read_text().splitlines()) if resumed else 0
with (root / "metrics.jsonl").open("a") as file:
    for step in range(first, config["train"]["steps"]):
        if act == "fail" and step == 1:
            print("p3o: the reward broke", file=sys.stderr)
            sys.exit(1)
        if act == "nan" and step == 2:
            print("p3o: non-finite policy ratio; nothing was stepped", file=sys.stderr)
            sys.exit(1)
        if act in ("hang", "killed") and step == 2 and not resumed:
            file.flush()
            if act == "killed":
                (root / "checkpoints" / "latest").write_text("step_2")
                os.kill(os.getpid(), signal.SIGKILL)
            (root.parent / "pid").write_text(str(os.getpid()))
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(60)
        if act == "short" and step == 3:
            sys.exit(0)
        file.write(json.dumps({"step": step, "reward/mean": step}) + chr(10))
"""


@pytest.fixture
def command(tmp_path: Path) -> tuple[str, ...]:
    path = tmp_path / "fake_train.py"
    path.write_text(FAKE_TRAIN)
    return (sys.executable, str(path))


def acts(*names: str) -> dict[str, Any]:
    """An axis with a setting for each act."""
    return {"act": {name: {"data.generator_args": {"act": name}} for name in names}}


def start(path: Path, command: Sequence[str], jobs: int = 1) -> tuple[Plan, list[Outcome]]:
    plan = load_plan(path)
    check_plan(plan)
    write_plan(plan)
    return plan, run_all(plan, plan.runs, jobs=jobs, command=command)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_runs_are_made_once_and_then_skipped(tmp_path: Path, command: tuple[str, ...]) -> None:
    path = write_study(tmp_path, {"objective": OBJECTIVES}, collapse={"window": 2})
    plan, outcomes = start(path, command)
    out = tmp_path / "out"
    assert [(each.run.name, each.action, each.exit_code) for each in outcomes] == [
        (name, Action.START, 0) for name in ("p3o/seed0", "grpo/seed0")
    ]
    assert [each.final_reward for each in outcomes] == [2.5] * 2  # mean of 2 and 3
    assert (out / "grpo/seed0.log").read_text().startswith("words []")
    assert {each.exit_code for each in read_status(out).values()} == {0}
    before = (out / "p3o/seed0/metrics.jsonl").stat().st_mtime_ns
    _, again = start(path, command)
    assert {(each.action, each.exit_code, each.final_reward) for each in again} == {
        (Action.SKIP, 0, 2.5)
    }
    assert (out / "p3o/seed0/metrics.jsonl").stat().st_mtime_ns == before
    # The study is kept with its base, and can be gone on with from there.
    assert [run.config for run in load_plan(out / "study.yaml").runs] == [
        run.config for run in plan.runs
    ]


def test_a_failed_run_does_not_stop_the_rest(tmp_path: Path, command: tuple[str, ...]) -> None:
    path = write_study(tmp_path, acts("fail", "short", "finish"))
    _, (failed, short, finished) = start(path, command)
    assert (failed.exit_code, failed.message) == (1, "p3o: the reward broke")
    assert short.exit_code == 1
    assert "ended without all 4 steps" in short.message
    assert (finished.exit_code, finished.final_reward) == (0, 1.5)
    status = read_status(tmp_path / "out")
    assert status["fail", 0].message == "p3o: the reward broke"
    assert status["finish", 0].exit_code == 0
    # Without a checkpoint it starts from nothing.
    _, again = start(path, command)
    assert [each.action for each in again] == [Action.RESTART, Action.RESTART, Action.SKIP]


def test_a_killed_run_is_resumed_from_its_checkpoint(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    path = write_study(tmp_path, acts("killed"))
    _, (killed,) = start(path, command)
    assert (killed.exit_code, killed.message.split(";")[0]) == (137, "ended by SIGKILL")
    _, (resumed,) = start(path, command)
    assert (resumed.action, resumed.exit_code, resumed.final_reward) == (Action.RESUME, 0, 1.5)
    first, second = (tmp_path / "out/killed/seed0.log").read_text().splitlines()
    assert (first.startswith("words [] "), second.startswith('words ["--resume"] ')) == (True, True)
    steps = (tmp_path / "out/killed/seed0/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps] == [0, 1, 2, 3]


def test_a_run_that_met_nan_is_not_started_again(tmp_path: Path, command: tuple[str, ...]) -> None:
    path = write_study(tmp_path, acts("nan"))
    _, (first,) = start(path, command)
    assert (first.exit_code, first.action) == (1, Action.START)
    _, (again,) = start(path, command)
    assert (again.exit_code, again.action) == (1, Action.STOPPED)
    assert again.message.startswith("p3o: non-finite policy ratio")
    assert "remove" in again.message


def test_jobs_run_together_and_share_the_cores(tmp_path: Path, command: tuple[str, ...]) -> None:
    path = write_study(tmp_path, {"objective": OBJECTIVES}, seeds=(0, 1))
    _, outcomes = start(path, command, jobs=2)
    assert [each.exit_code for each in outcomes] == [0] * 4
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    log = (tmp_path / "out/p3o/seed0.log").read_text()
    assert log == f'words ["--run.num_threads_per_rank", "{share}"] {share}\n'


@pytest.mark.parametrize(
    ("number", "raised"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, asyncio.CancelledError)],
)
def test_an_interrupt_ends_every_process(
    tmp_path: Path, command: tuple[str, ...], number: int, raised: type[BaseException]
) -> None:
    plan = load_plan(write_study(tmp_path, acts("hang"), seeds=(0, 1)))
    write_plan(plan)
    pid_file = tmp_path / "out/hang/pid"

    def interrupt() -> None:
        wait_until(lambda: pid_file.exists() and pid_file.read_text())
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(raised):
        run_all(plan, plan.runs, jobs=1, command=command)
    assert not is_alive(int(pid_file.read_text()))
    attempt = read_status(tmp_path / "out")["hang", 0]
    assert (attempt.exit_code, attempt.has_failed) == (None, False)
    assert check_plan(plan) == {"hang/seed0": Action.RESTART, "hang/seed1": Action.START}


def test_runs_end_when_the_study_is_killed(tmp_path: Path, command: tuple[str, ...]) -> None:
    path = write_study(tmp_path, acts("hang"))
    code = (
        "from megatron_p3o.study.arms import load_plan\n"
        "from megatron_p3o.study.runner import run_all, write_plan\n"
        f"plan = load_plan({str(path)!r}); write_plan(plan)\n"
        f"run_all(plan, plan.runs, command={command!r})\n"
    )
    study = subprocess.Popen([sys.executable, "-c", code])
    pid_file = tmp_path / "out/hang/pid"
    wait_until(lambda: pid_file.exists() and pid_file.read_text())
    # Meanwhile nobody else touches the run.
    plan = load_plan(path)
    (busy,) = run_all(plan, plan.runs, command=command)
    assert (busy.action, busy.message) == (None, "another process is running it")
    study.kill()
    study.wait()
    wait_until(lambda: not is_alive(int(pid_file.read_text())))


def test_a_run_dir_of_another_study_is_refused(tmp_path: Path, command: tuple[str, ...]) -> None:
    path = write_study(tmp_path, {"objective": OBJECTIVES})
    start(path, command)
    changed = {**OBJECTIVES, "grpo": {"objective.name": "grpo", "objective.clip_high": 0.4}}
    write_study(tmp_path, {"objective": changed})
    with pytest.raises(InputError, match=r"arm 'grpo' \(there, here: objective.clip_high: 0.3, 0."):
        check_plan(load_plan(path))
    # An arm more is fine.
    write_study(tmp_path, {"objective": {**OBJECTIVES, "rloo": {"objective.name": "rloo"}}})
    assert check_plan(load_plan(path)) == {
        "p3o/seed0": Action.SKIP,
        "grpo/seed0": Action.SKIP,
        "rloo/seed0": Action.START,
    }


def test_what_is_no_run_is_not_removed(tmp_path: Path) -> None:
    plan = load_plan(write_study(tmp_path, {"objective": OBJECTIVES}))
    root = tmp_path / "out/p3o/seed0"
    root.mkdir(parents=True)
    (root / "servers").mkdir()
    assert check_plan(plan)["p3o/seed0"] is Action.RESTART
    (root / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match=r"also holds 'thesis.tex'"):
        check_plan(plan)


def test_a_run_dir_is_no_study_dir(tmp_path: Path) -> None:
    path = write_study(tmp_path, {"objective": OBJECTIVES})
    write_run(tmp_path / "out", [0.0])
    with pytest.raises(InputError, match="is a run dir"):
        check_plan(load_plan(path))


def test_only_selects_arms_and_runs(tmp_path: Path) -> None:
    plan = load_plan(write_study(tmp_path, {"objective": OBJECTIVES}, seeds=(0, 1)))
    assert [run.name for run in select(plan, ["g*"])] == ["grpo/seed0", "grpo/seed1"]
    assert [run.name for run in select(plan, ["*/seed1"])] == ["p3o/seed1", "grpo/seed1"]
    with pytest.raises(ConfigurationError, match="'x\\*' matches no arm; the arms are p3o, grpo"):
        select(plan, ["x*"])


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    path = write_study(tmp_path, {"objective": OBJECTIVES})
    result = CliRunner().invoke(app, ["study", "run", str(path), "--dry-run", "--only", "grpo"])
    assert result.exit_code == 0
    assert result.output.split() == ["start", "grpo/seed0"]
    assert not (tmp_path / "out").exists()


def test_runs_can_be_written_for_a_scheduler(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"objective": OBJECTIVES}, seeds=[0, 1])
    result = CliRunner().invoke(app, ["study", "run", str(study), "--write", "--only", "grpo"])
    assert result.exit_code == 0
    arm = tmp_path / "out" / "grpo"
    expected = [f"{arm}/seed{seed}.yaml {arm}/seed{seed}" for seed in range(2)]
    assert result.stdout.splitlines() == expected
    assert load_config(arm / "seed1.yaml").run.seed == 1
    assert load_config(arm / "seed1.yaml").objective.name == "grpo"
    assert not (arm / "seed1").exists()


def test_the_command_says_what_was_done(tmp_path: Path) -> None:
    path = write_study(tmp_path, {"objective": {"p3o": OBJECTIVES["p3o"]}})
    write_run(tmp_path / "out/p3o/seed0", [0.0, 0.25, 0.5, 0.75])
    result = CliRunner().invoke(app, ["study", "run", str(path)])
    assert result.exit_code == 0
    assert "1/1  p3o/seed0  finished before  final reward 0.375" in result.output
    assert "1 runs: 1 done, 0 failed" in result.output


def test_messages_of_non_finite_errors_are_known() -> None:
    for sums in (
        EssSums(sum_w=float("nan"), sum_w2=1.0, num_tokens=2.0, num_nonfinite=1.0),
        EssSums(sum_w=0.0, sum_w2=0.0, num_tokens=2.0, num_nonfinite=0.0),
    ):
        with pytest.raises(NonFiniteError) as caught:
            _ = sums.ess
        said = f"p3o: {caught.value}"
        attempt = Attempt(arm="a", seed=0, exit_code=1, seconds=1.0, message=said)
        assert attempt.is_nonfinite
    other = Attempt(arm="a", seed=0, exit_code=1, seconds=1.0, message="p3o: too many rewards fail")
    assert not other.is_nonfinite


def test_last_words() -> None:
    assert last_words("step 1\np3o: broke:\n  field x\n\n") == "p3o: broke:   field x"
    assert last_words("Traceback\nKeyError: 'x'\n") == "KeyError: 'x'"
    assert last_words("\n") == ""
