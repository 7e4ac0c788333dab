"""The report: its files, what they say of incomplete runs, and that the page stands alone."""

import csv
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_p3o.cli import app
from megatron_p3o.study.analyze import ArmSummary, summarize_arms, summarize_run
from megatron_p3o.study.arms import load_plan
from megatron_p3o.study.config import CollapseRule
from megatron_p3o.study.figures import design
from megatron_p3o.study.page import Page, to_html
from megatron_p3o.study.report import collapse_text, write_report
from megatron_p3o.study.runner import write_plan
from megatron_p3o.study.runs import Run, RunSet, read_runs
from megatron_p3o.study.status import Attempt, append_status
from megatron_p3o.study.tables import Table
from tests.unit.studies import OBJECTIVES, write_run, write_study

SERVING = {"exact": {"precision.rollout": "fp32"}, "half": {"precision.rollout": "bf16"}}
METRICS = ("ess/step", "mismatch/k3", "ratio/p99", "ratio/max", "grad_norm", "entropy/mean")


def make_study(directory: Path) -> Path:
    """Two objectives, two ways of serving, two seeds: all complete but grpo__half, of which one
    run met a NaN and the other is not there."""
    path = write_study(
        directory,
        {"objective": OBJECTIVES, "serving": SERVING},
        seeds=(0, 1),
        collapse={"window": 2},
        report={"baseline": {"serving": "exact"}},
    )
    plan = load_plan(path)
    write_plan(plan)
    for run in plan.runs:
        broken = run.arm.name == "grpo__half"
        if broken and run.seed == 1:
            continue
        gap = 0.25 if run.config.precision.rollout == "bf16" else 0.0
        rewards = [0.0, 0.5, 0.5 + 0.1 * run.seed, 0.7][: 3 if broken else 4]
        sections = run.config.model_dump(mode="json", include={"objective", "precision"})
        write_run(
            run.run_dir.root,
            rewards,
            fields=sections,
            metrics={name: [gap + 0.5] * 4 for name in METRICS},
            steps=4,
            seed=run.seed,
        )
        if broken:
            said = "p3o: gradient norm is nan <although> every log-prob was finite"
            attempt = Attempt(arm="grpo__half", seed=0, exit_code=1, seconds=1.0, message=said)
            append_status(directory / "out", attempt)
    return directory / "out"


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    study = make_study(tmp_path_factory.mktemp("study"))
    write_report(study, study / "report")
    return study / "report"


def test_a_row_for_each_arm(report: Path) -> None:
    found = {row["arm"]: row for row in rows(report / "summary.csv")}
    assert list(found) == ["p3o__exact", "p3o__half", "grpo__exact", "grpo__half"]
    p3o = found["p3o__exact"]
    assert (p3o["objective"], p3o["serving"], p3o["runs"], p3o["complete"]) == (
        "p3o",
        "exact",
        "2",
        "2",
    )
    # (0.5 + 0.7) / 2 and (0.6 + 0.7) / 2
    assert float(p3o["reward_final_mean"]) == pytest.approx(0.625)
    assert float(p3o["reward_final_ci95"]) == pytest.approx(12.706 * 0.025)
    assert p3o["collapsed"] == "0"
    broken = found["grpo__half"]
    assert [broken[name] for name in ("runs", "complete", "over", "collapsed")] == list("2011")
    assert (broken["collapse_steps"], broken["reward_final_mean"]) == ("3", "")
    # This metric is in no run.
    assert (p3o["mismatch_abs_logprob_mean"], p3o["mismatch_abs_logprob_n"]) == ("", "0")


def test_a_row_for_each_run(report: Path) -> None:
    found = {row["run"]: row for row in rows(report / "runs.csv")}
    assert len(found) == 7
    broken = found["grpo__half/seed0"]
    assert [broken[name] for name in ("state", "steps", "planned_steps", "collapsed_at")] == [
        "non-finite",
        "3",
        "4",
        "3",
    ]
    whole = found["p3o__half/seed1"]
    assert (whole["state"], whole["seed"], whole["ess_min"]) == ("complete", "1", "0.75")


def test_differences_to_the_baseline(report: Path) -> None:
    found = {(row["arm"], row["quantity"]): row for row in rows(report / "differences.csv")}
    assert set(found) == {
        ("p3o__half", name) for name in ("mismatch_k3", "ess_mean", "reward_final")
    }
    k3 = found["p3o__half", "mismatch_k3"]
    assert [k3[name] for name in ("baseline_arm", "difference", "ci95", "n")] == [
        "p3o__exact",
        "0.25",
        "0.0",
        "2",
    ]


def test_the_page_stands_alone_and_says_what_is_missing(report: Path) -> None:
    page = (report / "report.html").read_text()
    assert not re.findall(r"(?:src|href)=\"(?!data:)", page)
    assert page.count("data:image/png;base64,") == 8
    for words in (
        "4 arms, 8 runs: 6 complete, 1 non-finite, 1 not started.",
        "below 0.5 times the best m",
        "p3o: gradient norm is nan &lt;although&gt;",
        '<td class="mark">NON-FINITE</td>',
        "<td>grpo__half/seed1</td>",
        "1 of 1 (at 3)",
        "mismatch/abs_logprob_mean is not in p3o__exact/seed0",
    ):
        assert words in page, words
    assert "mulated" not in page
    assert len(page) < 3_000_000


def test_the_tables_as_markdown(report: Path) -> None:
    text = (report / "summary.md").read_text()
    assert "| p3o__exact | 2 of 2 | 0.250 ± 0.000 | 0.625 ± 0.318 |" in text
    assert "| grpo__half | 0 of 2 | - | - | - | - | 1 of 1 (at 3) |" in text
    assert "| grpo__half/seed0 | NON-FINITE | 3 of 4 | 3 |" in text


def test_equal_runs_make_equal_reports(report: Path, tmp_path: Path) -> None:
    written = write_report(report.parent, tmp_path)
    assert {path.name for path in written} >= {"report.html", "collapse.png", "differences.csv"}
    for path in written:
        assert path.read_bytes() == (report / path.relative_to(tmp_path)).read_bytes(), path


def test_copied_run_dirs_without_a_study(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / f"job{seed}", [0.5] * 12, seed=seed)
    write_run(tmp_path / "job2", [0.5] * 6, steps=12, fields={"objective": {"name": "grpo"}})
    result = CliRunner().invoke(app, ["study", "report", str(tmp_path), "--out", f"{tmp_path}/r"])
    assert result.exit_code == 0, result.output
    assert f"{tmp_path}/r/report.html" in result.output.split()
    assert not (tmp_path / "r/differences.csv").exists()
    found = rows(tmp_path / "r/summary.csv")
    assert [(row["arm"], row["complete"], row["reward_final_mean"]) for row in found] == [
        ("p3o", "2", "0.5"),
        ("grpo", "0", ""),
    ]
    # ESS and the like are in no run: nothing to draw but rewards, ends and collapses.
    assert sorted(path.name for path in (tmp_path / "r/figures").iterdir()) == [
        "collapse.png",
        "final_reward.png",
        "reward.png",
    ]


def test_a_run_without_a_step(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [], steps=3)
    write_report(tmp_path, tmp_path / "report")
    assert rows(tmp_path / "report/runs.csv")[0]["state"] == "incomplete"


def test_emulated_fp8_is_said(tmp_path: Path) -> None:
    root = write_run(tmp_path / "a", [0.5] * 3)
    text = (root / "config.yaml").read_text()
    (root / "config.yaml").write_text(text.replace("rollout: fp32", "rollout: fp8-block"))
    write_report(tmp_path, tmp_path / "report")
    page = (tmp_path / "report/report.html").read_text()
    assert '<p class="banner">Emulated FP8: in all runs FP8 numerics were' in page
    assert "<td>all (emulated FP8)</td>" in page
    assert rows(tmp_path / "report/summary.csv")[0]["emulated_fp8"] == "true"


def test_out_that_is_a_file_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.5] * 3)
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(
        app, ["study", "report", str(tmp_path), "--out", str(tmp_path / "file")]
    )
    assert "cannot be written" in str(result.exception)


def arms_of(labels: list[Mapping[str, str]]) -> list[ArmSummary]:
    runs = [
        Run(name=str(index), labels=each, seed=0, tree={}, records={0: {"step": 0}})
        for index, each in enumerate(labels)
    ]
    return summarize_arms([summarize_run(run, CollapseRule()) for run in runs])


def found_with(**settings: list[str]) -> RunSet:
    return RunSet(runs=(), settings=settings)


def test_objectives_are_colours_and_the_other_axes_panels() -> None:
    labels: list[Mapping[str, str]] = [
        {"serving": serving, "objective": objective, "model": "tiny"}
        for objective in ("grpo", "p3o")
        for serving in ("half", "exact")
    ]
    found = found_with(serving=["exact", "half"], objective=["p3o", "grpo"], model=["tiny"])
    plan = design(found, arms_of(labels))
    assert plan.panels == ("serving exact", "serving half")
    assert list(plan.colours) == ["p3o", "grpo"]
    assert plan.places["half__grpo__tiny"] == ("serving half", "grpo")
    assert plan.colours["p3o"] == ("#0072B2", "-")


def test_more_groups_than_colours_have_other_lines() -> None:
    names = [f"o{index}" for index in range(9)]
    plan = design(found_with(objective=names), arms_of([{"objective": name} for name in names]))
    assert len(set(plan.colours.values())) == 9
    assert plan.panels == ("",)


def test_fields_of_an_objective_are_colours_too() -> None:
    labels: list[Mapping[str, str]] = [
        {"objective.name": "p3o", "objective.clip_high": "-"},
        {"objective.name": "grpo", "objective.clip_high": "0.2"},
    ]
    settings: dict[str, Any] = {
        "objective.name": ["p3o", "grpo"],
        "objective.clip_high": ["0.2", "-"],
    }
    plan = design(found_with(**settings), arms_of(labels))
    assert list(plan.colours) == ["p3o", "grpo 0.2"]


def test_text_is_escaped() -> None:
    table = Table("a < b", ("c & d",), (("<script>",),), note="<i>")
    page = Page(title="<t>", banners=["<b>"], introduction=[], tables=[table], notes=["<n>"])
    html = to_html(page, [])
    for tag in ("<script>", "<i>", "<t>", "<b>", "<n>"):
        assert tag not in html
    assert "<td>&lt;script&gt;</td>" in html
    markdown = Table("t", ("a|b",), (("c\nd",),)).to_markdown()
    assert markdown == "## t\n\n| a\\|b |\n| --- |\n| c d |\n"


def test_the_rule_in_words() -> None:
    text = collapse_text(CollapseRule(window=5, drop=0.25))
    assert "mean reward over 5 steps" in text
    assert "below 0.75 times the best m before it" in text


def test_a_study_read_again_has_the_same_runs(report: Path) -> None:
    found = read_runs(report.parent)
    assert (len(found.runs), found.missing) == (7, ("grpo__half/seed1",))
