"""A run on a Ray cluster of this machine: placement, servers, trainers, clean end."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_p3o.rollout.sglang.cluster import free_ports
from tests.conftest import ROOT
from tests.integration.test_sglang_train import metrics, server_processes, sglang_run, wait_until

RAY = Path(sys.executable).with_name("ray")


@pytest.fixture
def ray_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster of one node without GPUs, with as many CPUs as bundles ask for."""
    port = free_ports("127.0.0.1", 1)[0]
    environment = {**os.environ, "RAY_DISABLE_IMPORT_WARNING": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    words = [
        *(str(RAY), "start", "--head", "--port", str(port), "--node-ip-address", "127.0.0.1"),
        *("--num-cpus", "3", "--num-gpus", "0", "--include-dashboard", "false"),
        *("--object-store-memory", str(100 * 2**20)),
    ]
    subprocess.run(words, check=True, env=environment, timeout=120, capture_output=True)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        subprocess.run([str(RAY), "stop", "--force"], check=True, timeout=60, capture_output=True)


def test_a_run_is_placed_by_ray(ray_address: str, tmp_path: Path, tiny_model_dir: Path) -> None:
    config = sglang_run(
        tmp_path,
        tiny_model_dir,
        train={"steps": 3, "prompts_per_step": 2, "samples_per_prompt": 2},
        rollout={"launch": {"replicas": 1}},
    )
    words = [
        *(sys.executable, str(ROOT / "tools" / "ray_launch.py"), str(config)),
        *("--trainer-nodes", "1", "--server-nodes", "1", "--gpus-per-node", "0"),
        *("--cpus-per-node", "1", "--ranks-per-node", "2", "--strategy", "PACK"),
        *("--address", ray_address, "--train.steps", "4"),
    ]
    result = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = metrics(tmp_path / "run")
    assert [record["step"] for record in found] == [0, 1, 2, 3]
    assert found[0]["mismatch/abs_logprob_mean"] < 1e-5
    assert "layout" in json.dumps((tmp_path / "run" / "config.yaml").read_text())
    # The servers ended with the run: their logs are in no process's hands.
    logs = [path.parent for path in Path(tmp_path).rglob("server_0.log")]
    wait_until(lambda: not [p for directory in logs for p in server_processes(directory)])


def test_a_run_without_servers_to_start_is_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = sglang_run(tmp_path, tiny_model_dir)
    words = [sys.executable, str(ROOT / "tools" / "ray_launch.py"), str(config)]
    result = subprocess.run(
        [*words, "--rollout.engine", "embedded"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 2
    assert "rollout.engine=embedded with rollout.launch.replicas=2 starts no servers" in (
        result.stderr
    )
