"""Command lines of servers follow from the run's configuration."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_p3o.api_key import read_api_key
from megatron_p3o.architecture import read_architecture
from megatron_p3o.config import RunConfig, parse_config
from megatron_p3o.errors import InputError
from megatron_p3o.parent import guard_words
from megatron_p3o.rollout.sglang import ManagedProcess, ServerFlags, managed_servers
from megatron_p3o.rollout.sglang.flags import Command, own_environment
from megatron_p3o.trainer.serve import announcement
from megatron_p3o.trainer.served_model import server_flags


def run_config(model_dir: Path, **sections: dict[str, Any]) -> RunConfig:
    tree: dict[str, dict[str, Any]] = {
        "run": {"dir": "runs/unused"},
        "model": {"path": str(model_dir)},
        "data": {"source": "jsonl", "path": "unused.jsonl", "max_prompt_tokens": 40},
        "train": {"steps": 1, "prompts_per_step": 1, "samples_per_prompt": 2},
        "sampling": {"max_new_tokens": 24},
        "rollout": {"engine": "sglang", "launch": {"replicas": 2}},
    }
    for name, fields in sections.items():
        tree[name] = {**tree.get(name, {}), **fields}
    return parse_config(tree)


def flags(config: RunConfig, directory: Path, device: str = "cuda", **fields: Any) -> ServerFlags:
    architecture = read_architecture(config.model.path)
    return server_flags(config, architecture, device_type=device, directory=directory, **fields)


def options(command: Command) -> dict[str, str]:
    """Each option with the word behind it."""
    words = command.words
    following = {word: words[i + 1] if i + 1 < len(words) else "" for i, word in enumerate(words)}
    return {w: "" if v.startswith("--") else v for w, v in following.items() if w[:2] == "--"}


def test_options_follow_from_the_sections(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = run_config(
        tiny_model_dir,
        rollout={
            "engine": "sglang",
            "launch": {
                "replicas": 2,
                "tensor_parallel_size": 2,
                "python": "/opt/sglang/bin/python",
                "args": ["--mem-fraction-static", "0.8"],
            },
        },
        precision={"rollout": "bf16", "rollout_kv_cache": "fp8_e5m2"},
    )
    command = flags(config, tmp_path, first_gpu=4).server(1, 31001, 0)
    assert command.words[:3] == ("/opt/sglang/bin/python", "-m", "sglang.launch_server")
    found = options(command)
    assert found | {"--random-seed": ""} == {
        "--model-path": str(tiny_model_dir),
        "--host": "127.0.0.1",
        "--port": "31001",
        "--tensor-parallel-size": "2",
        "--dtype": "bfloat16",
        "--context-length": str(40 + 24 + 8),
        "--random-seed": "",
        "--weight-version": "unpublished",
        "--skip-tokenizer-init": "",
        "--kv-cache-dtype": "fp8_e5m2",
        "--base-gpu-id": "6",
        "--mem-fraction-static": "0.8",
    }
    assert "--trust-remote-code" not in command.words


def test_no_two_servers_and_no_two_starts_share_a_seed(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = run_config(tiny_model_dir)
    seeds = [
        options(flags(config, tmp_path, first_step=step).server(replica, 31000, starts))[
            "--random-seed"
        ]
        for step in (0, 5)
        for replica in (0, 1)
        for starts in (0, 1)
    ]
    assert len(set(seeds)) == 8


def test_a_context_longer_than_the_models_is_not_asked_for(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = run_config(tiny_model_dir, sampling={"max_new_tokens": 4000})
    reach = read_architecture(tiny_model_dir).max_position_embeddings
    found = options(flags(config, tmp_path).server(0, 1, 0))
    assert found["--context-length"] == str(reach)


def test_old_prefixes_are_not_kept_where_generations_go_on_in_place(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    for staleness, is_off in ((0, False), (1, True)):
        rollout = {
            "engine": "sglang",
            "launch": {"replicas": 1},
            "interrupt": "in_place",
            "max_staleness": staleness,
        }
        command = flags(run_config(tiny_model_dir, rollout=rollout), tmp_path).server(0, 1, 0)
        assert ("--disable-radix-cache" in command.words) == is_off


def test_fp8_servers_start_with_a_configuration_and_no_weights(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = run_config(tiny_model_dir, precision={"rollout": "fp8-block"})
    found = options(flags(config, tmp_path).server(0, 1, 0))
    assert found["--load-format"] == "dummy"
    content = json.loads((Path(found["--model-path"]) / "config.json").read_text())
    assert content["quantization_config"]["weight_block_size"] == [128, 128]
    assert "lm_head" in content["quantization_config"]["modules_to_not_convert"]
    assert sorted(path.name for path in Path(found["--model-path"]).iterdir()) == ["config.json"]


def test_servers_are_no_ranks_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "PYTHONPATH"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    environment = own_environment()
    assert not {n for n in environment if n.startswith(("TORCHELASTIC", "MASTER", "PYTHONPATH"))}
    assert not {"RANK", "WORLD_SIZE"} & environment.keys()
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_a_key_is_on_no_command_line_and_in_no_readable_file(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    key = "s3cr3t"
    made = flags(run_config(tiny_model_dir), tmp_path, api_key=key)
    server, router = made.server(0, 31000, 0), made.router(31002, 31003, ("http://h:31000",))
    for command in (server, router):
        assert key not in " ".join(command.words)
        assert command.environment["P3O_SECRET"] == key
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_guarded_command_gets_its_key_and_leaves_it_in_no_output(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "shows.py").write_text(
        "import os, sys; print(sys.argv[1:], __name__, os.environ.get('P3O_SECRET'));"
        "print(sys.argv[-1], file=sys.stderr)"
    )
    made = flags(run_config(tiny_model_dir), tmp_path, api_key="s3cr3t")
    words = [*made._module("shows"), "--port", "7"]
    result = subprocess.run(
        guard_words(words),
        cwd=tmp_path,
        env={**os.environ, "P3O_SECRET": "s3cr3t"},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert result.stdout == "['--port', '7', '--api-key', '***'] __main__ None\n"
    assert result.stderr == "***\n"


def test_keys_are_read_from_the_environment_or_a_file(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(**fields: str) -> str | None:
        rollout = {"engine": "sglang", "launch": {"replicas": 1}, **fields}
        return read_api_key(run_config(tiny_model_dir, rollout=rollout).rollout)

    assert read() is None
    with pytest.raises(InputError, match=r"rollout.api_key_env='P3O_KEY' names an environment"):
        read(api_key_env="P3O_KEY")
    monkeypatch.setenv("P3O_KEY", " k1\n")
    assert read(api_key_env="P3O_KEY") == "k1"
    file = tmp_path / "key"
    with pytest.raises(InputError, match="cannot be read"):
        read(api_key_file=str(file))
    file.write_text("\n")
    with pytest.raises(InputError, match="is empty"):
        read(api_key_file=str(file))
    file.write_text("k2\n")
    assert read(api_key_file=str(file)) == "k2"


def test_p3o_serve_says_how_to_train_on_its_servers(tiny_model_dir: Path, tmp_path: Path) -> None:
    launch = {"replicas": 2, "port": 31000, "router": True}
    config = run_config(tiny_model_dir, rollout={"engine": "sglang", "launch": launch})
    server_set = managed_servers(flags(config, tmp_path))
    assert announcement(config, server_set) == (
        "ready; p3o train with: --rollout.servers '[http://127.0.0.1:31000, "
        "http://127.0.0.1:31001]' --rollout.router http://127.0.0.1:31002"
    )


PARENT = """
import subprocess, sys, time
from megatron_p3o.parent import guard_words
child = ["bash", "-c", "sleep 987654 & sleep 987654"]
guard = subprocess.Popen(guard_words(child), start_new_session=True)
print(guard.pid, flush=True)
time.sleep(1000)
"""


def sleepers(group: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, ProcessLookupError):
            continue
    return found


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_guarded_command_ends_with_its_parent(number: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    group = int(parent.stdout.readline())
    wait_for(lambda: len(sleepers(group)) == 4)  # the guard, bash and two sleeps
    parent.send_signal(number)
    parent.wait(10)
    wait_for(lambda: not sleepers(group))


def test_a_guarded_command_ends_with_its_guard() -> None:
    guard = subprocess.Popen(guard_words(["sleep", "987654"]), start_new_session=True)
    wait_for(lambda: len(sleepers(guard.pid)) == 2)
    guard.kill()
    guard.wait(10)
    wait_for(lambda: not sleepers(guard.pid))


def test_a_guard_hands_on_the_exit_code_and_ends_what_is_left() -> None:
    words = guard_words(["bash", "-c", "sleep 987654 & exit 7"])
    guard = subprocess.Popen(words, start_new_session=True)
    assert guard.wait(20) == 7
    wait_for(lambda: not sleepers(guard.pid))


def test_a_stopped_process_is_not_started_again(tmp_path: Path) -> None:
    """As when a run ends while one of its servers is being restarted."""
    command = Command(words=("sleep", "987654"), environment=dict(os.environ))
    process = ManagedProcess("sleeper", lambda _: command, tmp_path / "log")
    process.start()
    assert process.exit_status() is None
    process.start()
    assert process.num_starts == 2
    group = process._process.pid if process._process is not None else 0
    wait_for(lambda: len(sleepers(group)) == 2)
    process.stop()
    assert not sleepers(group)
    process.start()
    assert process.num_starts == 2
    assert process.exit_status() == "ended by SIGTERM"


def test_a_process_tells_how_it_ended_and_what_it_said_last(tmp_path: Path) -> None:
    words = ("bash", "-c", "echo first; echo last words; exit 3")
    command = Command(words=words, environment=dict(os.environ))
    process = ManagedProcess("talker", lambda _: command, tmp_path / "logs" / "log")
    process.start()
    wait_for(lambda: process.exit_status() is not None)
    assert process.exit_status() == "ended with exit code 3"
    assert process.last_words() == "last words"
    assert (tmp_path / "logs" / "log").stat().st_mode & 0o777 == 0o600
    process.stop()
