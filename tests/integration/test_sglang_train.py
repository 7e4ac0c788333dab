"""`p3o train` and `p3o serve` on real servers, as a user runs them, and what kills them."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

from megatron_p3o.rollout.sglang.cluster import free_ports
from tests.integration.commands import command, write_run
from tests.integration.sglang_servers import server_python

TIMEOUT_S = 240.0
KEY = "s3cr3t-key-of-the-servers"


def sglang_run(directory: Path, model_dir: Path, **sections: dict[str, Any]) -> Path:
    rollout = {
        "engine": "sglang",
        "concurrency": 16,
        "probe_every_s": 0.5,
        "probe_timeout_s": 10.0,
        **sections.pop("rollout", {}),
    }
    launch = {"replicas": 2, "python": str(server_python()), **rollout.pop("launch", {})}
    return write_run(directory, model_dir, rollout={**rollout, "launch": launch}, **sections)


class Running:
    """A p3o process whose output is read while it runs."""

    def __init__(self, words: Sequence[str], cwd: Path, **environment: str) -> None:
        self._log = cwd / f"{'-'.join(words[:1])}-{time.monotonic_ns()}.log"
        with self._log.open("wb") as stream:
            self.process = subprocess.Popen(
                command(*words),
                cwd=cwd,
                env={**os.environ, **environment},
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        self.until(lambda: text in self.output, text)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {what}:\n{self.output}"
            time.sleep(0.05)

    def wait(self) -> int:
        try:
            return self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end:\n{self.output}") from None


@contextmanager
def running(words: Sequence[str], cwd: Path, **environment: str) -> Iterator[Running]:
    started = Running(words, cwd, **environment)
    try:
        yield started
    finally:
        started.process.terminate()
        try:
            started.process.wait(30)
        except subprocess.TimeoutExpired:
            started.process.kill()


def server_processes(directory: Path) -> list[psutil.Process]:
    """Everything of the servers whose logs are in the directory, by their open files."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(directory) in file.path for file in process.open_files()):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return [p for p in found if p.pid != os.getpid()]


def main_server(directory: Path, number: int) -> psutil.Process:
    """The process that `sglang.launch_server` is: the child of the guard that writes its log."""
    log = str(directory / f"server_{number}.log")
    for guard in server_processes(directory):
        is_guard = any(word.endswith("parent.py") for word in guard.cmdline())
        if is_guard and any(file.path == log for file in guard.open_files()):
            return guard.children()[0]
    raise AssertionError(f"no server {number}")


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def samples(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


PACED_REWARD = """
import os, time

def reward(prompt, response, answer):
    if os.path.exists({pace!r}):
        time.sleep(1.0)
    return float(len(response) % 2)
"""


def test_a_run_survives_a_killed_server_and_ends_clean(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """One step off, behind a router, with an API key; a server is killed on the way, and training
    is slow until it is back."""
    pace = tmp_path / "pace"
    (tmp_path / "paced.py").write_text(PACED_REWARD.format(pace=str(pace)))
    steps = 60
    config = sglang_run(
        tmp_path,
        tiny_model_dir,
        data={
            "source": "generator",
            "generator": "arithmetic",
            "generator_args": {"max_operand": 2, "template": "{a}{op}{b}="},
            "chat": False,
            "reward": {"name": "paced:reward"},
        },
        train={"steps": steps, "prompts_per_step": 4, "samples_per_prompt": 4},
        sampling={"max_new_tokens": 24, "temperature": 0.7},
        rollout={
            "max_staleness": 1,
            "api_key_env": "P3O_TEST_KEY",
            "publish": {"transport": "tensor", "verify_every": 1},
            "launch": {"router": True},
        },
        checkpoint={"every": 20},
    )
    run = tmp_path / "run"
    environment = {
        "P3O_TEST_KEY": KEY,
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
    }
    with running(["train", str(config)], tmp_path, **environment) as trainer:
        trainer.wait_for("step  3/")
        pace.touch()
        main_server(run / "servers", 0).kill()
        trainer.wait_for("restart 1 of 10")
        trainer.until(lambda: trainer.output.count("is up: SGLang") == 3, "server again")
        shown = trainer.output.count("\nstep ")
        trainer.until(lambda: trainer.output.count("\nstep ") > shown + 1, "further steps")
        pace.unlink()
        assert trainer.wait() == 0, trainer.output
        output = trainer.output
    assert output.count("|gap| mean") == 2
    assert output.count("samples fail and are tried again") <= 3
    found = metrics(run)
    assert [record["step"] for record in found] == list(range(steps))
    assert sum(record["rollout/server_restarts"] for record in found) == 1
    assert found[-1]["rollout/servers_serving"] == 2
    assert max(record["staleness/max"] for record in found) == 1
    # At the first step nothing is stale: trainer and servers compute the same numbers.
    assert found[0]["mismatch/abs_logprob_mean"] < 1e-5
    by_step: dict[int, set[str]] = {}
    for sample in samples(run):
        name = f"{sample['prompt_id']}/{sample['sample_index']}"
        by_step.setdefault(sample["step"], set()).add(name)
        assert 0 <= sample["step"] - sample["weight_version_min"] <= 1
    assert [len(by_step[step]) for step in range(steps)] == [16] * steps
    assert len(set.union(*by_step.values())) == steps * 16
    wait_until(lambda: not server_processes(run / "servers"))
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".distcp"]
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def test_servers_end_with_a_killed_launcher(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = sglang_run(tmp_path, tiny_model_dir)
    servers = tmp_path / "run" / "servers"
    with running(["train", str(config)], tmp_path) as trainer:
        trainer.until(lambda: len(server_processes(servers)) >= 4, "servers that start")
        trainer.process.kill()
        trainer.process.wait()
        wait_until(lambda: not server_processes(servers))


def test_a_run_without_servers_waits_then_stops_and_can_be_resumed(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """On servers of `p3o serve`, which are all killed, and started again for the resumed run."""
    port = free_ports("127.0.0.1", 1)[0]
    sections: dict[str, Any] = {
        "train": {"steps": 60, "prompts_per_step": 2, "samples_per_prompt": 2},
        "rollout": {
            "outage_timeout_s": 4.0,
            "probe_timeout_s": 2.0,
            "launch": {"port": port, "replicas": 2, "max_restarts": 0},
            "publish": {"transport": "distributed"},
        },
        "checkpoint": {"every": 2, "keep": 3},
    }
    config = sglang_run(tmp_path, tiny_model_dir, **sections)
    run, logs = tmp_path / "run", tmp_path / "logs"
    urls = [f"http://127.0.0.1:{port + number}" for number in range(2)]
    serve = ["serve", str(config), "--logs", str(logs)]
    train = ["train", str(config), "--rollout.servers", yaml.safe_dump(urls)]
    with running(serve, tmp_path) as server:
        server.wait_for(f"--rollout.servers '[{urls[0]}, {urls[1]}]'")
        with running(train, tmp_path) as trainer:
            trainer.wait_for("step  5/60")
            for number in range(2):
                main_server(logs, number).kill()
            assert trainer.wait() == 1
            message = trainer.output.strip().splitlines()[-1]
            assert message.startswith("p3o: no rollout server could serve for "), trainer.output
            assert "rollout.outage_timeout_s=4 s" in message and "--resume" in message
        assert server.process.poll() is None
    wait_until(lambda: not server_processes(logs))
    steps = len(metrics(run))
    assert steps < 60
    with running(serve, tmp_path) as server:
        server.wait_for("ready; p3o train with")
        with running([*train, "--resume", "--train.steps", str(steps + 3)], tmp_path) as trainer:
            assert trainer.wait() == 0, trainer.output
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 0
    assert [record["step"] for record in metrics(run)] == list(range(steps + 3))
    wait_until(lambda: not server_processes(logs))
