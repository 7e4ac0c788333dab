"""The doctor's findings about a run: layout, memory, servers, disk, ports, the dry run."""

import json
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from megatron_p3o import cli
from megatron_p3o.config import RunConfig, to_yaml
from megatron_p3o.doctor import command, dry_run, run
from megatron_p3o.doctor.facts import Facts, Package
from megatron_p3o.doctor.findings import Finding
from megatron_p3o.doctor.run_facts import (
    RunFacts,
    busy_ports,
    fixed_ports,
    plan_options,
    read_run_facts,
)
from megatron_p3o.doctor.servers import ServerFacts, ask_server
from megatron_p3o.doctor.system import Ran
from megatron_p3o.plan import make_plan
from tests.unit.plan_runs import DENSE, SERVERS, model_dir, run_config
from tests.unit.test_doctor import h100, laptop, torch_package, with_packages

GIVEN = {"engine": "sglang", "servers": ["http://a:1"]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_dir(tmp_path / "model", DENSE)


def gpus(count: int) -> Facts:
    """H100s, as many as that."""
    facts = replace(h100(), gpus=h100().gpus[:1] * count)
    return with_packages(facts, torch=torch_package(*((9, 0),) * count))


def planned(config: RunConfig, facts: Facts, **changes: Any) -> RunFacts:
    fields: dict[str, Any] = {"family": "llama", "plan": make_plan(config, plan_options(facts))}
    return RunFacts(**{**fields, **changes})


def layout(config: RunConfig, facts: Facts) -> Finding:
    return run.check_layout(config, facts, planned(config, facts))


def test_a_plan_is_made_for_this_machines_gpus() -> None:
    options = plan_options(gpus(4))
    assert (options.gpus_per_node, options.gpu) == (4, "h100")
    assert options.gpu_memory_gb == pytest.approx(85.52, abs=0.01)
    assert plan_options(laptop()).gpus_per_node == 1


@pytest.mark.parametrize(
    ("data", "rollout", "num_gpus", "status", "used"),
    [
        (8, {}, 8, "ok", "all GPUs"),
        (4, {}, 8, "ok", "all but 4 GPUs"),
        (None, {}, 8, "ok", "all GPUs"),
        (16, {}, 8, "warning", "2 nodes like this one"),
        (12, {}, 8, "broken", ""),
        (6, SERVERS, 8, "ok", "all GPUs"),
        (7, SERVERS, 8, "broken", ""),
        (None, SERVERS, 8, "broken", ""),
        # Servers of others take no GPU here.
        (8, GIVEN, 8, "ok", "all GPUs"),
    ],
)
def test_ranks_and_servers_against_gpus(
    model: Path,
    data: int | None,
    rollout: dict[str, Any],
    num_gpus: int,
    status: str,
    used: str,
) -> None:
    config = run_config(model, layout={"data": data}, rollout=rollout)
    finding = layout(config, gpus(num_gpus))
    assert (finding.status, finding.used) == (status, used)


def test_what_to_do_when_servers_have_no_gpu_left(model: Path) -> None:
    finding = layout(run_config(model, rollout=SERVERS), gpus(8))
    assert finding.found == "8 ranks and 2 GPUs of servers, 8 GPUs here"
    assert finding.remedy.startswith("make layout.data x 1 at most 6; left out")


def test_ranks_on_a_cpu_share_its_cores(model: Path) -> None:
    config = run_config(model, layout={"data": 16})
    assert layout(config, laptop()).status == "warning"
    assert layout(run_config(model, layout={"data": 2}), laptop()).status == "ok"


def test_a_layout_that_does_not_fit_the_model_is_broken() -> None:
    finding = run.check_layout(
        run_config(Path("x")),
        laptop(),
        RunFacts(plan_problem="layout.tensor=3 must divide 2; use 2"),
    )
    assert (finding.status, finding.found, finding.remedy) == (
        *("broken", "layout.tensor=3 must divide 2"),
        "use 2",
    )


def test_one_cause_is_told_once() -> None:
    problem = "model.path='x': no such directory; give one"
    facts = RunFacts(inputs_problem=problem, plan_problem=problem)
    found = run.run_findings(run_config(Path("x")), laptop(), facts)
    assert [finding.part for finding in found if finding.status == "broken"] == ["p3o check"]


def test_memory_of_the_plan_against_this_gpu(model: Path) -> None:
    config, facts = run_config(model), gpus(1)
    fits = run.check_memory(facts, planned(config, facts))
    # Weights of a toy: the allowance of 3 GB is all.
    assert fits.status == "ok"
    assert fits.found.startswith("about 3.0 GB of 85.5 GB on a GPU of stage 0: ")
    small = replace(facts, gpus=(replace(facts.gpus[0], memory_bytes=2 * 10**9),))
    plan = planned(config, small)
    finding = run.check_memory(small, plan)
    assert finding.status == "broken"
    assert "stage 0 needs 3.0 GB of 2 GB" in finding.remedy
    assert plan.plan is not None
    assert len(run.check_plan(small, plan)) == len(plan.plan.warnings) - 1


@pytest.mark.parametrize(
    ("trainer", "capability", "status"),
    [
        ("bf16", (8, 0), "ok"),
        ("fp8-blockwise", (9, 0), "ok"),
        ("fp8-blockwise", (8, 9), "broken"),
        ("fp8-mxfp8", (9, 0), "broken"),
    ],
)
def test_precision_against_the_gpu(
    model: Path, trainer: str, capability: tuple[int, int], status: str
) -> None:
    config = run_config(model, precision={"trainer": trainer, "rollout": "bf16"})
    facts = with_packages(gpus(1), torch=torch_package(capability))
    assert run.check_precision(config, facts).status == status
    if trainer != "bf16":
        assert run.check_precision(config, laptop()).status == "fallback"


def answers(status: int, content: Any) -> httpx.MockTransport:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer key"
        if request.url.path == "/health":
            return httpx.Response(status)
        return httpx.Response(200, json=content)

    return httpx.MockTransport(answer)


INFO = {"version": "0.5.23", "tp_size": 2, "device": "cuda"}


@pytest.mark.parametrize(
    ("status", "content", "server"),
    [
        (
            *(200, INFO),
            ServerFacts(url="http://a:1", version="0.5.23", tensor_parallel_size=2, device="cuda"),
        ),
        (503, INFO, ServerFacts(url="http://a:1", problem="/health answered 503")),
        (
            *(200, {"no": 1}),
            ServerFacts(
                url="http://a:1", problem="/server_info is not SGLang's (KeyError('version'))"
            ),
        ),
    ],
)
def test_what_a_server_answers(status: int, content: Any, server: ServerFacts) -> None:
    transport = answers(status, content)
    asked = ask_server("http://a:1/", api_key="key", timeout_s=1.0, transport=transport)
    assert asked == server


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as held:  # bound and not listening: refused
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        server = ask_server(url, api_key=None, timeout_s=5.0)
    assert server.problem is not None and "cannot be reached" in server.problem
    (finding,) = run.check_servers(run_config(Path("x")), RunFacts(servers=(server,)))
    assert finding.status == "broken"


@pytest.mark.parametrize(
    ("version", "is_allowed", "status"),
    [("0.5.23", False, "ok"), ("0.6.0", True, "warning"), ("0.6.0", False, "broken")],
)
def test_versions_of_servers(version: str, is_allowed: bool, status: str) -> None:
    allow = {"allow_untested_version": is_allowed}
    server = ServerFacts(url="http://a:1", version=version, tensor_parallel_size=1, device="cuda")
    (given,) = run.check_servers(
        run_config(Path("x"), rollout={**GIVEN, **allow}), RunFacts(servers=(server,))
    )
    started = run_config(Path("x"), rollout={**SERVERS, **allow})
    facts = replace(h100(), sglang={"sglang": Package(version=version)})
    (launched,) = run.check_launch(started, facts)
    assert (given.status, launched.status) == (status, status)


def test_the_interpreter_of_servers_must_work() -> None:
    config = run_config(Path("x"), rollout=SERVERS)
    broken = replace(h100(), sglang={"sglang": Package(problem="ImportError: libnuma.so.1")})
    (finding,) = run.check_launch(config, broken)
    assert finding.status == "broken"
    assert finding.found == "/opt/sglang/bin/python: ImportError: libnuma.so.1"
    launch = {**SERVERS["launch"], "router": True}
    with_router = run_config(Path("x"), rollout={**SERVERS, "launch": launch})
    no_router = replace(h100(), sglang={"sglang": Package(version="0.5.23")})
    (finding,) = run.check_launch(with_router, no_router)
    assert "sglang-router==0.3.2" in finding.remedy
    assert run.check_launch(run_config(Path("x")), broken) == []
    assert run.check_launch(run_config(Path("x"), rollout=GIVEN), broken) == []


def test_fixed_ports_must_be_free() -> None:
    launch = {**SERVERS["launch"], "port": 30000}
    config = run_config(Path("x"), rollout={**SERVERS, "launch": launch})
    # Two servers, the router, its metrics.
    assert list(fixed_ports(config)) == [30000, 30001, 30002, 30003]
    assert not fixed_ports(run_config(Path("x"), rollout=SERVERS))
    (finding,) = run.check_ports(config, RunFacts(busy_ports=(30001,)))
    assert (finding.status, "30001" in finding.found) == ("broken", True)
    (finding,) = run.check_ports(config, RunFacts())
    assert finding.status == "ok"
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        assert busy_ports("127.0.0.1", [port]) == [port]
    assert busy_ports("127.0.0.1", [port, 65536]) == [65536]


@pytest.mark.parametrize(
    ("trainer", "every", "keep", "copies"),
    [("bf16", 5, 2, 3 * 14), ("fp32", 5, 1, 2 * 16), ("bf16", 0, 2, 0)],
)
def test_disk_for_checkpoints(
    model: Path, trainer: str, every: int, keep: int, copies: int
) -> None:
    config = run_config(
        model,
        precision={"trainer": trainer, "rollout": trainer},
        checkpoint={"every": every, "keep": keep},
    )
    plan = make_plan(config, plan_options(laptop()))
    # Embedding and output 2 x 10 x 8; final norm 8; in each of 2 layers: attention
    # 8 x (8 + 4 + 4) + 8 x 8, MLP 3 x 8 x 16, norms 2 x 8.
    parameters = 160 + 8 + 2 * (128 + 64 + 384 + 16)
    assert run.disk_bytes(config, plan) == parameters * copies


def test_versions_of_the_weights_are_counted_where_they_are_written(model: Path) -> None:
    publish: dict[str, Any] = {"transport": "disk"}
    config = run_config(model, rollout={**SERVERS, "publish": publish})
    plan = make_plan(config, plan_options(laptop()))
    assert run.disk_bytes(config, plan) == 2 * plan.sync.bytes_per_server > 0
    elsewhere = {**publish, "directory": "/shared"}
    config = run_config(model, rollout={**SERVERS, "publish": elsewhere})
    assert run.disk_bytes(config, plan) == 0


def test_the_run_dir_must_be_writable_and_large_enough(model: Path) -> None:
    config = run_config(model, checkpoint={"every": 1})
    facts = laptop()
    assert run.check_run_dir(config, facts, planned(config, facts)).status == "ok"
    full = replace(facts, disk=replace(facts.disk, free_bytes=10))
    assert "room" in run.check_run_dir(config, full, planned(config, full)).remedy
    read_only = planned(config, facts, is_writable=False, run_dir_parent="/mnt")
    finding = run.check_run_dir(config, facts, read_only)
    assert (finding.status, finding.found[:5]) == ("broken", "/mnt ")


def test_facts_of_a_run_are_read_and_nothing_is_written(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = run_config(tiny_model_dir, run={"dir": str(tmp_path / "a/b")})
    found = read_run_facts(config, laptop(), resume=False)
    assert (found.inputs_problem, found.plan_problem) == (None, None)
    assert (found.run_dir_parent, found.is_writable) == (str(tmp_path), True)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    blocked = run_config(tiny_model_dir, run={"dir": str(tmp_path / "file/run")})
    assert not read_run_facts(blocked, laptop(), resume=False).is_writable
    missing = read_run_facts(run_config(tmp_path / "none"), laptop(), resume=False)
    assert missing.inputs_problem is not None and "no such directory" in missing.inputs_problem


def test_the_dry_run_goes_to_a_temporary_directory() -> None:
    publish = {"transport": "disk", "directory": "/shared"}
    config = run_config(
        Path("x"), optimizer={"warmup_steps": 5}, rollout={**SERVERS, "publish": publish}
    )
    words = dry_run.dry_run_words(config, "r.yaml", ["--run.dir", "mine"], Path("/t"))
    assert words[1:8] == [
        "-m",
        "megatron_p3o.cli",
        "train",
        "r.yaml",
        "--run.dir",
        "mine",
        "--run.dir",
    ]
    options = dict(zip(words[7::2], words[8::2], strict=True))
    assert options == {
        "--run.dir": "/t/run",
        "--train.steps": "1",
        "--checkpoint.every": "0",
        "--run.tensorboard": "false",
        "--optimizer.warmup_steps": "0",
        "--rollout.publish.directory": "/t/weights",
    }


def test_a_dry_run_that_fails_shows_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        dry_run, "run_program", lambda *_, **__: Ran(code=1, stderr="one\np3o: out of memory")
    )
    finding, output = dry_run.dry_run(run_config(Path("x")), "r.yaml", [], 1.0)
    assert (finding.status, finding.found) == ("broken", "ended with 1: p3o: out of memory")
    assert output == "one\np3o: out of memory"


@pytest.mark.parametrize(
    ("words", "code", "tried"),
    [([], 0, None), (["--dry-run"], 0, "ok"), (["--dry-run", "--train.steps", "0"], 2, None)],
)
def test_the_command_checks_a_run(
    words: list[str],
    code: int,
    tried: str | None,
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = run_config(tiny_model_dir, run={"dir": str(tmp_path / "run")})
    path = tmp_path / "run.yaml"
    path.write_text(to_yaml(config))
    monkeypatch.setattr(command, "read_facts", lambda **_: laptop())
    monkeypatch.setattr(dry_run, "run_program", lambda *_, **__: Ran(code=0))
    monkeypatch.setattr(sys, "argv", ["p3o", "doctor", str(path), "--json", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    written = capsys.readouterr()
    assert int(ended.value.code or 0) == code, written
    if code == 0:
        findings = json.loads(written.out)["findings"]
        of_run = {f["part"]: f["status"] for f in findings if f["section"] == str(path)}
        assert of_run["p3o check"] == of_run["run.dir"] == of_run["layout"] == "ok"
        assert of_run.get("dry run") == tried
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.yaml"]


def test_what_is_broken_is_not_tried(model: Path) -> None:
    sections = {"machine": [Finding(part="torch", status="broken", found="")]}
    finding, _ = command._try_step(run_config(model), "r.yaml", [], sections, 1.0)
    assert (finding.status, finding.found) == ("warning", "not tried")
