"""p3o watch: what a frame says, and that it follows a file that is written, cut and replaced."""

import io
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from megatron_p3o.cli import app, main
from megatron_p3o.errors import InputError
from megatron_p3o.inspect_run.follow import MetricsFollower
from megatron_p3o.inspect_run.frame import NAMES, sparkline
from megatron_p3o.inspect_run.plain import plain
from megatron_p3o.inspect_run.progress import Progress, State, duration
from megatron_p3o.inspect_run.watch import Watcher

BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
STEP = {
    "reward/mean": 0.25,
    "ess/step": 0.9,
    "mismatch/k3": 1e-5,
    "ratio/mean": 1.001,
    "entropy/mean": 2.5,
    "grad_norm": 0.75,
    "response/length_mean": 31.5,
    "time/step_s": 40.0,
    "time/rollout_s": 12.0,
    "time/train_s": 20.0,
}


def lines(steps: range, **values: Any) -> str:
    return "".join(json.dumps({"step": step, **STEP, **values}) + "\n" for step in steps)


def run_dir(root: Path, *, steps: int = 10, written: int | None = 3) -> Path:
    root.mkdir()
    (root / "config.yaml").write_text(f"train:\n  steps: {steps}\n")
    if written is not None:
        (root / "metrics.jsonl").write_text(lines(range(written)))
    return root


def picture(watcher: Watcher, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(watcher.frame())
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, BLOCKS),
        ([7, 0], 8, "\u2588\u2581"),
        ([2.0, 2.0, 2.0], 8, "\u2584" * 3),
        ([0, 0, 4, 4, 8, 8], 3, "\u2581\u2585\u2588"),  # means of pairs
        ([0, math.nan, 7], 8, "\u2581 \u2588"),
        ([0, 0, math.inf, 7], 2, "\u2581\u2588"),
        ([math.nan], 8, " "),
        ([], 8, ""),
    ],
)
def test_a_sparkline_goes_from_the_least_to_the_greatest(
    values: list[float], width: int, drawn: str
) -> None:
    assert sparkline(values, width) == drawn


def test_a_frame_fits_eighty_columns(tmp_path: Path) -> None:
    root = run_dir(tmp_path / "run", steps=100, written=0)
    (root / "metrics.jsonl").write_text(
        "".join(lines(range(step, step + 1), grad_norm=step / 7) for step in range(80))
    )
    watcher = Watcher(root)
    watcher.look()
    drawn = picture(watcher, width=80)
    (row,) = [line for line in drawn.splitlines() if line.startswith("grad norm")]
    # 80 steps in 32 columns: the first holds steps 0 and 1, the last 77 to 79.
    assert row.split()[3] == sparkline([step / 7 for step in range(80)], 32)
    assert row.split()[4:] == ["0.000", "11.286"]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.44, "0.4 s"),
        (9.96, "10 s"),
        (40, "40 s"),
        (119, "119 s"),
        (720, "12 min"),
        (3599, "1 h 0 min"),
        (3 * 3600 + 300, "3 h 5 min"),
        (86400 * 2 + 4 * 3600, "2 d 4 h"),
    ],
)
def test_durations_are_said_in_two_units_at_most(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_the_remaining_time_is_that_of_the_recent_steps() -> None:
    progress = Progress(total=100, names=NAMES)
    for step in range(30):
        progress.add({"step": step, "time/step_s": 1000.0 if step < 20 else 30.0})
    progress.add({"step": 30, "time/step_s": 500.0})  # one slow step is no trend
    assert progress.usual_step_s() == 30.0
    assert progress.remaining_s() == 69 * 30.0


@pytest.mark.parametrize(
    ("step_s", "silence_s", "state"),
    [
        (40.0, 199.0, State.RUNNING),
        (40.0, 201.0, State.SILENT),
        (0.1, 9.0, State.RUNNING),
        (0.1, 11.0, State.SILENT),
    ],
)
def test_a_run_is_silent_after_five_usual_steps(
    step_s: float, silence_s: float, state: State
) -> None:
    progress = Progress(total=10, names=NAMES)
    assert progress.state(silence_s) is State.WAITING
    progress.add({"step": 8, "time/step_s": step_s})
    assert progress.state(silence_s) is state
    progress.add({"step": 9, "time/step_s": step_s})
    assert progress.state(silence_s) is State.FINISHED


def test_a_frame_has_the_values_and_the_alarms(tmp_path: Path) -> None:
    root = run_dir(tmp_path / "run")
    with (root / "metrics.jsonl").open("a") as file:
        for step in range(3, 7):
            file.write(lines(range(step, step + 1), alarm=f"[red]ESS {step}"))
        file.write('{"step": 7, "rew')
    os.utime(root / "metrics.jsonl", (1000.0, 1000.0))
    watcher = Watcher(root, now=lambda: 1020.0)
    assert watcher.look() is State.RUNNING
    drawn = picture(watcher)
    assert drawn.splitlines()[2].split() == [
        "metric",
        "latest",
        "over",
        "all",
        "steps",
        "least",
        "greatest",
    ]
    assert "7/10 steps  running  ETA 2 min" in " ".join(drawn.split("\n"))
    rows = {line[:15].strip(): line[15:].split() for line in drawn.splitlines()}
    assert rows["reward"] == ["0.250", "\u2584" * 7, "0.250", "0.250"]
    assert rows["mismatch k3"][0] == "0.000010"
    assert "rollout 12.0  train 20.0" in drawn
    assert "alarm at step 6: [red]ESS 6" in drawn
    assert "alarm at step 4" in drawn and "alarm at step 3" not in drawn


def test_a_silent_run_says_so(tmp_path: Path) -> None:
    root = run_dir(tmp_path / "run")
    os.utime(root / "metrics.jsonl", (1000.0, 1000.0))
    watcher = Watcher(root, now=lambda: 1720.0)
    assert watcher.look() is State.SILENT
    assert "silent for 12 min; steps usually take 40 s" in picture(watcher)
    assert "ETA" not in picture(watcher)


def test_what_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    watcher = Watcher(root)
    assert watcher.look() is State.WAITING
    assert "0/? steps  waiting for the first step" in picture(watcher)
    (root / "config.yaml").write_text("train:\n  steps: 1\n")
    (root / "metrics.jsonl").write_text(lines(range(1)))
    assert watcher.look() is State.FINISHED
    assert "1/1 steps  finished" in picture(watcher)


def test_only_new_lines_are_read_and_half_ones_wait(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(path)
    assert follower.read() == ([], False)
    with path.open("w") as file:
        file.write('{"step": 0}\n{"st')
        file.flush()
        assert follower.read() == ([{"step": 0}], False)
        assert follower.read() == ([], False)
        file.write('ep": 1}\n')
        file.flush()
        assert follower.read() == ([{"step": 1}], False)


def test_a_resumed_run_replaces_what_was_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "x": 1}}\n' for step in range(4)))
    follower = MetricsFollower(path)
    assert len(follower.read()[0]) == 4
    # As long as before, in the same file: only its contents tell.
    path.write_text("".join(f'{{"step": {step}, "x": {1 + (step > 1)}}}\n' for step in range(4)))
    records, replaced = follower.read()
    assert replaced
    assert [record["x"] for record in records] == [1, 1, 2, 2]
    path.write_text('{"step": 0, "x": 1}\n')
    assert follower.read() == ([{"step": 0, "x": 1}], True)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n[1]\n{"step": 2}\n')
    with pytest.raises(InputError, match=r"metrics.jsonl', line 2: not a JSON object with a step"):
        MetricsFollower(path).read()


def test_control_sequences_do_not_reach_the_terminal() -> None:
    assert plain("a\x1b[31m\tb\n\r\u202e[red]\ud800") == "a\\x1b[31m\tb\n\\r\\u202e[red]\\ud800"


def test_the_command_prints_one_picture_without_a_terminal(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["watch", str(run_dir(tmp_path / "run"))])
    assert result.exit_code == 0, result.output
    assert "3/10 steps" in result.output
    assert "\x1b" not in result.output


def test_a_run_dir_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["p3o", "watch", str(tmp_path / "no")])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "is no directory; give the run.dir of a run" in capsys.readouterr().err
