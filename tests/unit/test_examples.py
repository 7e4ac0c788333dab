"""Every example is a valid configuration whose data and reward exist."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_p3o.config import load_config
from megatron_p3o.data import load_prompts, resolve_reward
from megatron_p3o.study.arms import load_plan
from tests.unit.example_files import ROOT, RUNS, STUDIES

# Those for clusters bring no data; tests/unit/test_cluster_examples.py checks them.
LOCAL = [path for path in RUNS if not path.parent.name.startswith("h100_")]


def test_the_shipped_examples_are_found() -> None:
    names = {str(path.relative_to(ROOT)) for path in RUNS}
    assert {
        "examples/quickstart/run.yaml",
        "examples/quickstart/harder.yaml",
        "examples/sglang_cpu/run.yaml",
        "examples/tiny/run.yaml",
    } <= names


@pytest.mark.parametrize("path", LOCAL, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_example_loads_and_its_data_and_reward_exist(path: Path) -> None:
    config = load_config(path)
    prompts = load_prompts(config.data)
    verify = resolve_reward(config.data.reward.name)
    first = prompts[0]
    assert verify(prompt=first.prompt, response=first.answer, answer=first.answer) == 1.0


@pytest.mark.parametrize(
    ("study", "num_runs"),
    [
        ("examples/fp8_study/study.yaml", 129),
        ("examples/fp8_study/smollm2_study.yaml", 16),
        ("examples/h100_qwen3_8b_fp8/study.yaml", 48),
    ],
)
def test_the_studies_have_valid_arms(study: str, num_runs: int) -> None:
    assert ROOT / study in STUDIES
    plan = load_plan(ROOT / study)
    assert len(plan.runs) == num_runs
    assert all(run.config.run.dir.startswith(plan.study.study.dir) for run in plan.runs)


def test_run_dirs_differ() -> None:
    dirs = [load_config(path).run.dir for path in RUNS]
    assert len(set(dirs)) == len(dirs)


def test_examples_load_without_torch() -> None:
    code = (
        "import sys; from megatron_p3o.config import load_config; "
        "[load_config(path) for path in sys.argv[1:]]; print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, RUNS)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stdout.strip() == "False"


def test_the_quickstart_is_the_task_that_the_benchmark_times() -> None:
    config = load_config(ROOT / "examples/quickstart/run.yaml")
    assert config.data.generator_args == {
        "operations": ["+"],
        "max_operand": 9,
        "template": "What is {a}{op}{b}? Answer with just the number.",
    }
    assert (config.train.prompts_per_step, config.train.samples_per_prompt) == (8, 8)
    assert (config.sampling.max_new_tokens, config.sampling.temperature) == (8, 1.0)
    assert config.optimizer.lr == 1e-5
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.optimizer.clip_grad == 1.0
