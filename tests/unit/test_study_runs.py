"""Reading run dirs: whole, half-written, of another version, copied from elsewhere."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_p3o.errors import InputError
from megatron_p3o.study.arms import load_plan
from megatron_p3o.study.runner import write_plan
from megatron_p3o.study.runs import Run, is_emulated, read_records, read_run, read_runs
from megatron_p3o.study.status import Attempt, append_status
from tests.unit.studies import OBJECTIVES, write_run, write_study


def grpo() -> dict[str, object]:
    return {"objective": {"name": "grpo"}}


def test_a_complete_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", [0.0, 0.5], seed=3), name="a")
    assert (run.is_complete, run.num_steps, run.planned_steps, run.seed) == (True, 2, 2, 3)
    assert run.series("reward/mean") == {0: 0.0, 1: 0.5}
    assert run.series("ess/step") == {}
    assert run.notes == ()


@pytest.mark.parametrize("tail", ['{"step": 2, "rew', "\0\0\0\n", '{"step": 2, "rew\n'])
def test_a_half_written_last_line_is_left_out(tmp_path: Path, tail: str) -> None:
    root = write_run(tmp_path / "a", [0.0, 0.5], steps=3)
    with (root / "metrics.jsonl").open("a") as file:
        file.write(tail)
    run = read_run(root, name="a")
    assert (list(run.records), run.is_complete) == ([0, 1], False)
    assert run.notes == ("metrics.jsonl: the last line is half-written and was left out",)


@pytest.mark.parametrize("line", ['{"step": 1, ', "[1]", '{"step": "1"}', '{"reward/mean": 1}'])
def test_a_broken_line_elsewhere_is_an_error(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(InputError, match=r"metrics.jsonl', line 2: not a JSON object"):
        read_records(path)


def test_of_steps_written_twice_the_later_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    steps = [(0, 0.0), (1, 0.1), (2, 0.2), (1, 0.3), (2, 0.4)]
    path.write_text("".join(json.dumps({"step": s, "x": x}) + "\n" for s, x in steps))
    records, notes = read_records(path)
    assert [record["x"] for record in records.values()] == [0.0, 0.3, 0.4]
    assert notes == ["metrics.jsonl: 2 steps are there twice; the later lines count"]


def test_missing_steps_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 3}\n')
    assert read_records(path)[1] == ["metrics.jsonl: 2 steps are missing"]


def test_values_that_are_no_numbers_are_not_in_a_curve(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", [0.5, math.nan, math.inf, 1.0]), name="a")
    assert run.series("reward/mean") == {0: 0.5, 3: 1.0}
    (tmp_path / "a/metrics.jsonl").write_text('{"step": 0, "x": "text", "y": true, "z": 2}\n')
    run = read_run(tmp_path / "a", name="a")
    assert (run.series("x"), run.series("y"), run.series("z")) == ({}, {}, {0: 2.0})


def test_a_configuration_of_another_version_is_read_as_it_is(tmp_path: Path) -> None:
    root = write_run(tmp_path / "a", [0.0, 0.5])
    tree = yaml.safe_load((root / "config.yaml").read_text())
    tree["train"]["warp_factor"] = 9
    (root / "config.yaml").write_text(yaml.safe_dump(tree))
    run = read_run(root, name="a")
    assert (run.planned_steps, run.is_complete, run.tree["train"]["warp_factor"]) == (2, True, 9)
    assert run.notes == (
        "config.yaml is of another version and was read without checks (train.warp_factor=9: no "
        "such field; remove it or mend its name)",
    )
    (root / "config.yaml").write_text("train: 7\n")
    run = read_run(root, name="a")
    assert (run.planned_steps, run.is_complete, run.seed) == (None, False, None)
    (root / "config.yaml").write_text("just text")
    with pytest.raises(InputError, match=r"config.yaml' must hold a mapping"):
        read_run(root, name="a")


def test_the_runs_of_a_study(tmp_path: Path) -> None:
    plan = load_plan(write_study(tmp_path, {"objective": OBJECTIVES}, seeds=(0, 1)))
    write_plan(plan)
    out = tmp_path / "out"
    write_run(out / "grpo/seed1", [0.1, 0.2], steps=4, fields=grpo(), seed=1)
    write_run(out / "p3o/seed0", [0.1] * 4)
    write_run(out / "old/seed0", [0.1] * 4)
    said = "p3o: gradient norm is inf although every log-prob was finite"
    append_status(out, Attempt(arm="grpo", seed=1, exit_code=1, seconds=2.0, message=said))
    with (out / "status.jsonl").open("a") as file:
        file.write('{"arm": "grpo"}\nhalf a li')
    found = read_runs(out)
    assert [(run.name, run.arm, run.is_complete) for run in found.runs] == [
        ("p3o/seed0", "p3o", True),
        ("grpo/seed1", "grpo", False),
    ]
    assert [run.is_nonfinite for run in found.runs] == [False, True]
    assert found.missing == ("p3o/seed1", "grpo/seed0")
    assert found.notes == ("study.yaml does not name old/seed0; it was left out",)
    assert found.settings == {"objective": ["p3o", "grpo"]}


def test_runs_without_a_study_are_labelled_by_their_differences(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / f"x/p{seed}", [0.1] * 2, seed=seed)
        write_run(tmp_path / f"y/g{seed}", [0.1] * 2, fields=grpo(), seed=seed)
    narrow = {"objective": {"name": "grpo", "clip_high": 0.1}, "model": {"path": "/other/models/x"}}
    write_run(tmp_path / "y/narrow", [0.1] * 2, fields=narrow)
    found = read_runs(tmp_path)
    assert [(run.name, dict(run.labels)) for run in found.runs] == [
        ("x/p0", {"objective.name": "p3o", "objective.clip_high": "-"}),
        ("x/p1", {"objective.name": "p3o", "objective.clip_high": "-"}),
        ("y/g0", {"objective.name": "grpo", "objective.clip_high": "0.2"}),
        ("y/g1", {"objective.name": "grpo", "objective.clip_high": "0.2"}),
        ("y/narrow", {"objective.name": "grpo", "objective.clip_high": "0.1"}),
    ]
    assert found.settings["objective.clip_high"] == ["0.1", "0.2", "-"]
    assert (found.study, found.missing) == (None, ())


def test_runs_that_differ_in_nothing_are_one_arm(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / f"run{seed}", [0.1] * 2, seed=seed)
    assert [run.arm for run in read_runs(tmp_path).runs] == ["all", "all"]
    assert [run.name for run in read_runs(tmp_path / "run0").runs] == ["."]


def test_a_study_of_another_version_falls_back_to_the_fields(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.1] * 2)
    (tmp_path / "study.yaml").write_text("study: {colour: red}\n")
    found = read_runs(tmp_path)
    assert [run.name for run in found.runs] == ["a"]
    assert found.notes[0].startswith("study.yaml cannot be read, so arms follow from the runs'")


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no run dir"):
        read_runs(tmp_path)
    with pytest.raises(InputError, match="is no directory"):
        read_runs(tmp_path / "none")


def test_emulated_fp8_is_that_of_the_embedded_engine() -> None:
    def of(tree: dict[str, Any], **record: float) -> bool:
        run = Run(name="r", labels={}, seed=0, tree=tree, records={0: {"step": 0, **record}})
        return is_emulated(run)

    assert of({"precision": {"rollout": "fp8-block"}, "rollout": {"engine": "embedded"}})
    assert of({"precision": {"rollout": "bf16", "rollout_kv_cache": "fp8_e4m3"}})
    assert not of({"precision": {"rollout": "bf16"}, "rollout": {"engine": "embedded"}})
    assert not of({"precision": {"rollout": "fp8-block"}, "rollout": {"engine": "sglang"}})
    assert not of({})
    # A trainer that emulates FP8 says so in its metrics.
    assert of({"precision": {"trainer": "fp8-mxfp8"}}, **{"precision/emulated": 1.0})
