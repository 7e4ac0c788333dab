"""`p3o plan` as a person uses it: words, exit codes, warnings, JSON, and a page that is true."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_p3o.config import load_config
from megatron_p3o.errors import UserError
from megatron_p3o.plan import PlanOptions, make_plan, render
from tests.unit.example_files import RUNS
from tests.unit.plan_runs import (
    DENSE,
    EXPERTS,
    GOLDEN,
    ROOT,
    SERVERS,
    architecture,
    model_dir,
    run_config,
)

EXAMPLE = str(ROOT / "examples/h100_qwen3_30b_a3b/run.yaml")
MODEL = ("--model.path", str(GOLDEN / "Qwen3-30B-A3B-Base"))


def p3o_plan(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron_p3o.cli", "plan", *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )


def test_json_has_the_numbers_of_the_tables() -> None:
    result = p3o_plan(EXAMPLE, *MODEL, "--nodes", "8", "--server-nodes", "4", "--json")
    assert result.returncode == 0, result.stderr
    tree = json.loads(result.stdout)
    assert tree["parameters"]["total"] == 30_532_122_624
    assert tree["layout"]["world_size"] == 64
    worst = tree["memory"][tree["worst_stage"]]
    phase = worst["phases"][worst["peak_phase"]]
    parts = sum(worst["resident"].values()) + sum(phase.values()) + worst["allowance"]
    assert worst["total"] == pytest.approx(parts)
    assert tree["servers"]["count"] == 16
    assert tree["sync"]["total_bytes"] == 16 * tree["sync"]["bytes_per_server"]
    assert tree["cost"]["times"]["one_step_off_s"] < tree["cost"]["times"]["synchronous_s"]
    assert tree["options"]["mfu"] == 0.35
    assert all(isinstance(warning, str) for warning in tree["warnings"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*MODEL, "--nodes", "8", "--layout.tensor", "3"), "layout.tensor=3 must divide"),
        ((*MODEL, "--nodes", "8", "--gpu", "t4"), "--gpu='t4' is not in the table"),
        (("--model.path", "nowhere"), "no such directory"),
        ((*MODEL, "--gpux", "h100"), "override '--gpux' must be --section.field VALUE"),
    ],
)
def test_bad_input_exits_with_2(words: tuple[str, ...], message: str) -> None:
    result = p3o_plan(EXAMPLE, *words)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("p3o: ")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, "--nodes=0 must be >= 1"),
        ({"gpus_per_node": 0}, "--gpus-per-node=0 must be >= 1"),
        ({"mfu": 0.0}, "--mfu=0.0 must be in (0, 1]"),
        ({"mbu": 1.5}, "--mbu=1.5 must be in (0, 1]"),
        ({"gpu_memory_gb": -1.0}, "--gpu-memory-gb=-1.0 must be > 0"),
        ({"prompt_tokens": 6}, "--prompt-tokens=6 must be <= data.max_prompt_tokens=5"),
        ({"response_tokens": 5}, "--response-tokens=5 must be <= sampling.max_new_tokens=4"),
        ({"nodes": 3, "gpus_per_node": 3}, "layout needs 2 ranks"),
    ],
)
def test_bad_options_name_themselves(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    architecture(tmp_path, DENSE)
    with pytest.raises(UserError) as error:
        make_plan(run_config(tmp_path, layout={"data": 2}), PlanOptions(**options))
    assert message in str(error.value)


def test_experts_that_do_not_fit_the_ranks_are_refused(tmp_path: Path) -> None:
    architecture(tmp_path, EXPERTS)
    with pytest.raises(UserError, match=r"layout\.data="):
        make_plan(run_config(tmp_path, layout={"expert": 4}), PlanOptions(nodes=1, gpus_per_node=2))


def test_a_reference_of_its_own_is_read(tmp_path: Path) -> None:
    policy = model_dir(tmp_path / "policy", DENSE)
    reference = model_dir(tmp_path / "reference", DENSE, num_hidden_layers=4)
    config = run_config(
        policy, reference={"kl_coefficient": 0.1, "model_path": str(reference)}, rollout=SERVERS
    )
    made = make_plan(config, PlanOptions(gpus_per_node=1))
    assert made.memory[0].resident["reference model"] == 2 * (3240 + 2 * 592)
    assert made.cost.flops.reference > made.cost.flops.score
    broken = run_config(
        policy, reference={"kl_coefficient": 0.1, "model_path": str(tmp_path / "none")}
    )
    with pytest.raises(UserError, match=r"reference.model_path=.*no such directory"):
        make_plan(broken, PlanOptions())


def warned(config: Any, **options: Any) -> str:
    made = make_plan(config, PlanOptions(**{"gpus_per_node": 1, **options}))
    text = render(made)
    assert all(f"warning: {warning[:20]}" in text for warning in made.warnings)
    return " / ".join(made.warnings)


def test_what_does_not_fit_is_said_with_a_cure(tmp_path: Path) -> None:
    architecture(tmp_path, DENSE)
    config = run_config(tmp_path, rollout=SERVERS)
    assert warned(config) == ""
    text = warned(config, gpu_memory_gb=1e-6)
    assert "the largest part is optimizer" in text
    assert "optimizer.distributed=true on more data-parallel ranks" in text
    assert "leave no room for one sequence" in text
    text = warned(config, gpu_memory_gb=3.2e-4)
    assert "rollout.concurrency=128, but a server holds the KV cache of" not in text
    text = warned(config, gpu_memory_gb=1e-5)
    assert "rollout.concurrency=128, but a server holds the KV cache of" in text


@pytest.mark.parametrize(
    ("fields", "sections", "options", "warning"),
    [
        (
            {"num_hidden_layers": 4},
            {"layout": {"pipeline": 4}, "train": {"microbatch_size": 16}},
            {"nodes": 4},
            "1 microbatches on 4 pipeline stages leave a bubble of 75%",
        ),
        (
            {},
            {"layout": {"tensor": 2}},
            {"nodes": 2},
            "layout.tensor=2 crosses nodes of 1 GPUs",
        ),
        (
            {},
            {"optimizer": {"distributed": False}},
            {"nodes": 2},
            "optimizer.distributed=false keeps the whole optimizer state",
        ),
        (
            {},
            {"train": {"recompute": "selective"}},
            {},
            "train.recompute=selective computes attention again",
        ),
    ],
)
def test_waste_is_said_with_a_cure(
    fields: dict[str, Any],
    sections: dict[str, Any],
    options: dict[str, Any],
    warning: str,
    tmp_path: Path,
) -> None:
    architecture(tmp_path, DENSE, **{"num_key_value_heads": 2, **fields})
    assert warning in warned(run_config(tmp_path, **sections), **options)


def test_experts_that_wait_are_said(tmp_path: Path) -> None:
    architecture(tmp_path, EXPERTS)
    text = warned(run_config(tmp_path, layout={"expert": 4}), nodes=4)
    assert "each expert gets about 32 tokens of a microbatch" in text
    assert "layout.expert=4 leaves one expert on a rank" in text
    assert "layout.expert=4 x layout.expert_tensor=1 crosses nodes of 1 GPUs" in text


def test_servers_or_trainers_that_wait_are_said() -> None:
    config = run_config(
        GOLDEN / "Qwen3-8B-Base",
        rollout={**SERVERS, "max_staleness": 1},
        data={"max_prompt_tokens": 1024},
        sampling={"max_new_tokens": 4096},
    )
    assert "move nodes from trainers to servers" in warned(config, nodes=8)
    assert "move nodes from servers to trainers" in warned(config, server_nodes=64, mfu=0.01)


@pytest.mark.parametrize("path", RUNS, ids=str)
def test_every_example_can_be_planned(path: Path, tmp_path: Path) -> None:
    architecture(tmp_path, DENSE, num_hidden_layers=4, num_key_value_heads=2)
    config = load_config(path, ["--model.path", str(tmp_path), "--layout.expert", "1"])
    text = render(make_plan(config, PlanOptions()))
    assert "run, as configured" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_gpu_without_fp8_is_said(tmp_path: Path) -> None:
    architecture(tmp_path, DENSE)
    config = run_config(tmp_path, rollout=SERVERS, precision={"rollout": "fp8-block"})
    assert "--gpu=a100 has no FP8" in warned(config, gpu="a100")
    assert "no FP8" not in warned(config)


def test_the_page_shows_what_the_command_prints() -> None:
    printed = subprocess.run(
        [sys.executable, "tools/plan_page.py", "--print"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=ROOT,
    ).stdout
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    assert printed == page, "run: python tools/plan_page.py"
    assert page.count("    p3o plan examples/") >= 2
