"""STUDY.yaml: what it means, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_p3o.errors import ConfigurationError
from megatron_p3o.study.arms import differences, load_plan
from megatron_p3o.study.config import load_study, study_yaml
from tests.unit.studies import BASE, OBJECTIVES, write_study

SERVING = {"exact": {"precision.rollout": "fp32"}, "half": {"precision.rollout": "bf16"}}


def edit(path: Path, **changes: Any) -> Path:
    """Replace dotted places of a STUDY.yaml; `grids__0__axes` is grids[0].axes."""
    tree = yaml.safe_load(path.read_text())
    for place, value in changes.items():
        *parents, leaf = place.split("__")
        node = tree
        for parent in parents:
            node = node[int(parent)] if isinstance(node, list) else node[parent]
        node[leaf] = value
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def test_runs_are_the_product_of_axes_and_seeds(tmp_path: Path) -> None:
    path = write_study(tmp_path, {"objective": OBJECTIVES, "serving": SERVING}, seeds=(0, 5))
    plan = load_plan(path)
    assert [run.name for run in plan.runs] == [
        f"{arm}/seed{seed}"
        for seed in (0, 5)
        for arm in ("p3o__exact", "p3o__half", "grpo__exact", "grpo__half")
    ]
    last = plan.runs[-1]
    assert last.arm.labels == {"objective": "grpo", "serving": "half"}
    assert last.config.run.dir == str(tmp_path / "out/grpo__half/seed5")
    assert (last.config.run.seed, last.config.precision.rollout) == (5, "bf16")
    assert last.config.objective.model_dump(include={"name", "clip_low", "clip_high"}) == {
        "name": "grpo",
        "clip_low": 0.2,
        "clip_high": 0.3,
    }
    assert (last.yaml, last.log) == (
        tmp_path / "out/grpo__half/seed5.yaml",
        tmp_path / "out/grpo__half/seed5.log",
    )


def test_the_resolved_study_reads_back(tmp_path: Path) -> None:
    study = load_study(write_study(tmp_path, {"objective": OBJECTIVES}))
    (tmp_path / "again.yaml").write_text(study_yaml(study))
    assert load_study(tmp_path / "again.yaml") == study
    assert (study.collapse.window, study.collapse.drop, study.report.baseline) == (10, 0.5, None)


def test_another_objective_inherits_nothing_from_the_base(tmp_path: Path) -> None:
    objective = {"name": "p3o", "cap": "none", "advantage": "group_mean"}
    path = write_study(
        tmp_path,
        {"objective": {**OBJECTIVES, "base": {"optimizer.lr": 0.5}}},
        base={**BASE, "objective": objective},
    )
    p3o, grpo, base = (run.config.objective for run in load_plan(path).runs)
    assert (p3o.advantage, base.advantage) == ("group_mean", "group_mean")  # the name is unchanged
    assert (p3o.model_dump()["cap"], base.model_dump()["cap"]) == ("none", "none")
    assert grpo.advantage == "group_zscore"


def test_a_base_that_names_no_objective_has_p3o(tmp_path: Path) -> None:
    base = {**BASE, "objective": {"advantage": "group_mean"}}
    p3o, grpo = (
        run.config.objective
        for run in load_plan(write_study(tmp_path, {"o": OBJECTIVES}, base=base)).runs
    )
    assert (p3o.advantage, grpo.advantage) == ("group_mean", "group_zscore")


def test_an_arm_of_two_grids_is_taken_once(tmp_path: Path) -> None:
    path = write_study(tmp_path, {"objective": OBJECTIVES})
    more = {"objective": {**OBJECTIVES, "rloo": {"objective.name": "rloo"}}}
    edit(path, grids=[{"axes": {"objective": OBJECTIVES}}, {"axes": more}])
    assert [run.arm.name for run in load_plan(path).runs] == ["p3o", "grpo", "rloo"]


def test_a_grid_may_lack_an_axis(tmp_path: Path) -> None:
    served = {"objective": {"p3o": OBJECTIVES["p3o"]}, "serving": {"half": SERVING["half"]}}
    path = write_study(tmp_path, {})
    edit(path, grids=[{"axes": {"objective": OBJECTIVES}}, {"axes": served}])
    assert [run.arm.labels for run in load_plan(path).runs] == [
        {"objective": "p3o"},
        {"objective": "grpo"},
        {"objective": "p3o", "serving": "half"},
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"study__seeds": [1, 1]}, "study.seeds=[1, 1] names a seed twice"),
        ({"study__seeds": []}, "study.seeds=[]"),
        ({"study__seeds": ["1"]}, "study.seeds.0='1'"),
        ({"study__colour": 1}, "study.colour=1: no such field"),
        ({"grids": []}, "grids=[]"),
        ({"grids__0__axes": {}}, "has no axis"),
        ({"grids__0__axes": {"objective": {}}}, "axis 'objective' has no setting"),
        ({"grids__0__axes": {"a/b": {"x": {}}}}, "axis 'a/b' must be made of"),
        ({"grids__0__axes": {"a": {"..": {}}}}, "setting of axis 'a' '..' must be made of"),
        ({"grids__0__axes": {"a": {"x": {"lr": 1}}}}, "'lr' must be section.field"),
        ({"grids__0__axes": {"a": {"x": {"run.seed": 1}}}}, "run.seed is set by the study"),
        ({"grids__0__axes": {"a": {"x": {"optimizer.lrr": 1}}}}, "arm 'x': optimizer.lrr=1: no"),
        ({"grids__0__axes": {"a": {"x": {"optimizer.lr": -1}}}}, "arm 'x': optimizer.lr=-1"),
        (
            {"grids__0__axes": {"a": {"x": {"train.steps": 1}}, "b": {"y": {"train.steps": 2}}}},
            "axes 'a' and 'b' both set train.steps",
        ),
        (
            {"grids__0__axes": {"a": {"x": {}, "y": {"run.record": True}}}},
            "arms 'x' and 'y' have equal configurations",
        ),
        (
            {"grids": [{"axes": {"a": {"x": {}}}}, {"axes": {"b": {"x": {}}}}]},
            "would both be named 'x'",
        ),
        (
            {"grids": [{"axes": {"a": {"x": {}}}}, {"axes": {"a": {"x": {"train.steps": 2}}}}]},
            "arm 'x' sets {} in one grid and {'train.steps': 2} in another",
        ),
        ({"collapse": {"drop": 1.0}}, "collapse.drop=1.0"),
        ({"collapse": {"window": 0}}, "collapse.window=0"),
        ({"report": {"baseline": {"objective": "ppo"}}}, "report.baseline.objective='ppo' must be"),
        ({"study__base": "none.yaml"}, "none.yaml' cannot be read"),
    ],
)
def test_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = edit(write_study(tmp_path, {"objective": OBJECTIVES}), **changes)
    with pytest.raises(ConfigurationError) as caught:
        load_plan(path)
    assert said in str(caught.value)


def test_differences_leave_out_the_place_and_the_threads(tmp_path: Path) -> None:
    path = write_study(tmp_path, {"objective": OBJECTIVES, "serving": SERVING}, seeds=(0, 1))
    runs = {run.name: run.config for run in load_plan(path).runs}
    first = runs["p3o__exact/seed0"]
    moved = first.model_copy(
        update={"run": first.run.model_copy(update={"dir": "b", "num_threads_per_rank": 3})}
    )
    assert differences(first, moved) == []
    assert differences(first, runs["p3o__half/seed1"]) == [
        "run.seed: 0, 1",
        "precision.rollout: 'fp32', 'bf16'",
    ]
