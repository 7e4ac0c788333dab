"""What a person sees: alarms at the edges of their bands, step lines, the summary, the figure."""

import struct
from pathlib import Path
from typing import Any

import pytest

from megatron_p3o.config import RunConfig, parse_config
from megatron_p3o.run_dir import RunDir
from megatron_p3o.trainer.curves import draw_curves
from megatron_p3o.trainer.display import ConsoleDisplay, SilentDisplay, alarms, print_summary

METRICS = {
    "reward/mean": 0.25,
    "ess/step": 0.9,
    "ratio/mean": 1.0,
    "entropy/mean": 2.5,
    "grad_norm": 0.75,
    **{f"time/{phase}_s": 0.5 for phase in ("step", "rollout", "score", "train", "sync")},
    "time/checkpoint_s": 0.04,
}


def config_with(**ess: Any) -> RunConfig:
    return parse_config(
        {
            "run": {"dir": "runs/x"},
            "model": {"path": "models/m"},
            "data": {"source": "generator", "generator": "arithmetic"},
            "train": {"steps": 12, "prompts_per_step": 8, "samples_per_prompt": 8},
            "ess": ess,
        }
    )


def records(num_steps: int) -> list[dict[str, float]]:
    return [{**METRICS, "step": step, "reward/mean": step / 10} for step in range(num_steps)]


@pytest.mark.parametrize(
    ("ratio", "raised"),
    [(0.799, True), (0.8, False), (1.0, False), (1.25, False), (1.251, True), (3.0, True)],
)
def test_the_mean_ratio_alarms_strictly_outside_its_band(ratio: float, raised: bool) -> None:
    config = config_with(mean_ratio_band=[0.8, 1.25])
    found = alarms({**METRICS, "ratio/mean": ratio}, config)
    assert [text.split(";")[0] for text in found] == (
        [f"mean ratio {ratio:.3f} outside ess.mean_ratio_band [0.8, 1.25]"] if raised else []
    )


@pytest.mark.parametrize(("ess", "raised"), [(0.499, True), (0.5, False), (1.0, False)])
def test_the_ess_alarms_strictly_below_its_least(ess: float, raised: bool) -> None:
    found = alarms({**METRICS, "ess/step": ess}, config_with(min_ess=0.5))
    assert [text.split(";")[0] for text in found] == (
        ["ESS 0.499 below ess.min_ess 0.5"] if raised else []
    )


def test_numbers_that_are_no_numbers_alarm_too() -> None:
    found = alarms({**METRICS, "ratio/mean": float("nan")}, config_with())
    assert "mean ratio nan" in found[0]


def test_both_alarms_sound_together() -> None:
    found = alarms({**METRICS, "ratio/mean": 2.0, "ess/step": 0.1}, config_with())
    assert [text.split(" ")[0] for text in found] == ["mean", "ESS"]


def test_a_step_is_one_plain_line_and_its_alarms_follow(capsys: pytest.CaptureFixture[str]) -> None:
    display = ConsoleDisplay(config_with(), first_step=0)
    display.step(2, METRICS)
    display.step(3, {**METRICS, "ratio/mean": 2.0, "time/checkpoint_s": 1.25})
    display.close()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == (
        "step  3/12  reward 0.250  ess 0.9000  ratio 1.0000  grad 0.750  0.5s "
        "(rollout 0.5 score 0.5 train 0.5 sync 0.5)"
    )
    assert lines[1].startswith("step  4/12")
    assert lines[1].endswith("sync 0.5 checkpoint 1.2)")
    assert lines[2].startswith("step 3: alarm: mean ratio 2.000 outside ess.mean_ratio_band")
    assert len(lines) == 3


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    display = SilentDisplay()
    display.step(0, METRICS)
    display.close()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("num_steps", "reward_cells"),
    [
        (1, ["0.000", "0.000", "0.000", "0.000"]),
        (2, ["0.050", "0.050", "0.000", "0.100"]),
        (10, ["0.100", "0.800", "0.000", "0.900"]),
    ],
)
def test_the_summary_shows_edges_and_extremes(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    num_steps: int,
    reward_cells: list[str],
) -> None:
    print_summary(records(num_steps), RunDir(tmp_path))
    output = capsys.readouterr().out
    (row,) = [line for line in output.splitlines() if "reward/mean" in line]
    assert [word for word in row.split() if word.replace(".", "").isdigit()] == reward_cells
    assert f"{num_steps} steps" in output
    assert "curves.png" in output.replace("\n", "")


def test_curves_are_a_png_that_shows_the_records(tmp_path: Path) -> None:
    contents = []
    for num_steps in (1, 5):
        path = tmp_path / f"{num_steps}.png"
        draw_curves(records(num_steps), path, title="p3o")
        contents.append(path.read_bytes())
        assert contents[-1].startswith(b"\x89PNG\r\n\x1a\n")
        assert struct.unpack(">II", contents[-1][16:24]) == (1200, 720)
    assert contents[0] != contents[1]
