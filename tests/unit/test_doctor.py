"""The doctor's findings about made-up machines, and how facts are read."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_p3o import cli
from megatron_p3o.doctor import command, hardware, software, system
from megatron_p3o.doctor.facts import ABSENT, Facts, GpuFacts, Package, Space
from megatron_p3o.doctor.findings import Finding, exit_code
from megatron_p3o.doctor.package_probe import MARK
from megatron_p3o.doctor.report import print_findings, to_json, verdict
from megatron_p3o.doctor.system import Ran
from megatron_p3o.doctor.topology import parse_topology

GIB = 2**30
DGX_TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tNV18\tPXB\tSYS\t0-55\t0
GPU1\tNV18\t X \tNV18\tNODE\tSYS\t0-55\t0
GPU2\tNV18\tNV18\t X \tNODE\tSYS\t0-55\t0
NIC0\tPXB\tNODE\tNODE\t X \tSYS\t\t
NIC1\tSYS\tSYS\tSYS\tSYS\t X \t\t

Legend:

  X    = Self
"""
PCIE_TOPOLOGY = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tSYS\t0-9\nGPU1\tSYS\t X \t0-9\n"


def torch_package(*capabilities: tuple[int, int], **changes: Any) -> Package:
    details = {
        "cuda": "13.0" if capabilities else None,
        "nccl": "2.28.9" if capabilities else None,
        "has_gloo": True,
        "capabilities": [list(c) for c in capabilities],
    }
    return Package(version="2.13.0", details={**details, **changes})


def laptop(**changes: Any) -> Facts:
    """Without a GPU, with what `make venv` installs."""
    fields: dict[str, Any] = {
        "python": "3.11.7",
        "interpreter": "/venv/bin/python",
        "packages": {
            "torch": torch_package(),
            "megatron-core": Package(version="0.16.1"),
            "transformers": Package(version="5.24.0"),
        },
        "sglang_interpreter": "/venv/bin/python",
        "sglang": {"sglang": ABSENT, "sglang-router": ABSENT},
        "shared_memory": Space(path="/dev/shm", total_bytes=8 * GIB, free_bytes=8 * GIB),
        "disk": Space(path="/data", total_bytes=500 * GIB, free_bytes=100 * GIB),
        "open_files": (65536, 65536),
        "num_cores": 8,
        "memory_bytes": 16 * GIB,
        "available_bytes": 12 * GIB,
    }
    return Facts(**{**fields, **changes})


def h100(**changes: Any) -> Facts:
    """A DGX's node, with three of its GPUs."""
    gpu = GpuFacts(name="NVIDIA H100 80GB HBM3", memory_bytes=81559 * 2**20, driver="580.95.05")
    packages = {
        **laptop().packages,
        "torch": torch_package((9, 0), (9, 0), (9, 0)),
        "transformer-engine": Package(version="2.15"),
        "apex": Package(
            version="0.1", details={"is_nvidia": True, "parts": ["amp_C", "fast_layer_norm"]}
        ),
        "flash-attn": Package(version="2.8.3"),
        "ray": Package(version="2.60.0"),
    }
    fields: dict[str, Any] = {
        "packages": packages,
        "sglang_interpreter": "/opt/sglang/bin/python",
        "sglang": {
            "sglang": Package(version="0.5.23"),
            "sglang-router": Package(version="0.3.2"),
        },
        "gpus": (gpu,) * 3,
        "topology": DGX_TOPOLOGY,
        "infiniband": ("mlx5_0", "mlx5_1"),
        "nsys": "/usr/bin/nsys",
        "num_cores": 112,
        "memory_bytes": 2000 * GIB,
        "available_bytes": 1900 * GIB,
    }
    return laptop(**{**fields, **changes})


def with_packages(facts: Facts, **packages: Package) -> Facts:
    named = {name.replace("_", "-"): package for name, package in packages.items()}
    return replace(facts, packages={**facts.packages, **named})


def findings(facts: Facts) -> dict[str, Finding]:
    found = [*software.software_findings(facts), *hardware.hardware_findings(facts)]
    return {finding.part: finding for finding in found}


def statuses(facts: Facts, *wanted: str) -> set[str]:
    """Parts with one of these statuses."""
    return {part for part, finding in findings(facts).items() if finding.status in wanted}


def test_a_node_with_h100s_is_in_order() -> None:
    found = findings(h100())
    assert statuses(h100(), "warning", "broken", "fallback") == set()
    assert found["GPUs"].found == "3 x NVIDIA H100 80GB HBM3 85.5 GB, driver 580.95.05"
    assert found["GPUs"].used == "3 of 3"
    assert found["CUDA"].found == "13.0, capability 9.0"
    assert found["NCCL"].found == "2.28.9"
    assert found["FP8"].found == "delayed, tensorwise, blockwise (not mxfp8)"
    assert found["Apex"].found == "0.1: fused Adam and gradient clipping, persistent layer norm"
    assert (found["GPU links"].found, found["GPU links"].used) == ("NV18", "NVLink")
    assert found["InfiniBand"].found == "mlx5_0, mlx5_1"
    assert exit_code(found.values()) == 0


def test_a_laptop_falls_back_and_can_train() -> None:
    found = findings(laptop())
    assert statuses(laptop(), "warning", "broken") == set()
    assert statuses(laptop(), "fallback") == {
        *("CUDA", "NCCL", "Transformer Engine", "FP8", "Apex", "flash attention", "SGLang"),
        *("sglang-router", "ray", "profilers", "GPUs", "InfiniBand"),
    }
    assert found["Transformer Engine"].used.startswith("Megatron's local layers")
    assert found["SGLang"].used == "rollout.engine: embedded"
    assert verdict(list(found.values())) == "training can run here"


@pytest.mark.parametrize(
    ("capability", "able"),
    [
        ((8, 0), []),
        ((8, 9), ["delayed", "tensorwise"]),
        ((9, 0), ["delayed", "tensorwise", "blockwise"]),
        ((10, 0), ["delayed", "tensorwise", "blockwise", "mxfp8"]),
    ],
)
def test_recipes_by_capability(capability: tuple[int, int], able: list[str]) -> None:
    finding = software.check_fp8(with_packages(h100(), torch=torch_package(capability)))
    if able:
        assert finding.used == "precision.trainer: " + ", ".join(f"fp8-{name}" for name in able)
    else:
        assert (finding.status, finding.used) == ("fallback", "bf16")
        assert "this one has 8.0: choose bf16" in finding.remedy


def test_the_least_capable_gpu_decides() -> None:
    facts = with_packages(h100(), torch=torch_package((10, 0), (9, 0)))
    assert facts.capability == (9, 0)
    assert "mxfp8" not in software.check_fp8(facts).used


@pytest.mark.parametrize(
    ("facts", "part", "words"),
    [
        (replace(laptop(), python="3.10.12"), "Python", "3.11 or newer"),
        (with_packages(laptop(), torch=ABSENT), "torch", "docs/install.md"),
        (with_packages(laptop(), torch=Package(version="2.9.1")), "torch", "2.11 or newer"),
        (with_packages(laptop(), torch=torch_package(has_gloo=False)), "torch", "gloo"),
        (
            with_packages(laptop(), megatron_core=Package(problem="ImportError: libc10.so")),
            "megatron-core",
            "install",
        ),
        (with_packages(laptop(), transformers=ABSENT), "transformers", "install"),
        # GPUs that torch does not see: a CPU build of torch.
        (with_packages(h100(), torch=torch_package()), "CUDA", "driver 580.95.05"),
        (with_packages(h100(), transformer_engine=ABSENT), "Transformer Engine", "container"),
        (
            with_packages(h100(), torch=torch_package((9, 0), nccl=None)),
            "NCCL",
            "built with NCCL",
        ),
        (
            replace(h100(), gpus=(), gpu_problem="nvidia-smi: Driver/library version mismatch"),
            "GPUs",
            "--gpus all",
        ),
        (replace(laptop(), is_sglang_wanted=True), "SGLang", "sglang==0.5.23"),
    ],
)
def test_what_is_needed_and_broken_ends_with_1(facts: Facts, part: str, words: str) -> None:
    finding = findings(facts)[part]
    assert finding.status == "broken"
    assert words in finding.remedy
    assert exit_code([finding]) == 1


@pytest.mark.parametrize(
    ("facts", "part", "words"),
    [
        (
            with_packages(laptop(), megatron_core=Package(version="0.15.0")),
            "megatron-core",
            "megatron-core==0.16.1",
        ),
        (
            with_packages(laptop(), transformer_engine=Package(problem="OSError: libcuda.so.1")),
            "Transformer Engine",
            "uninstall",
        ),
        (
            replace(laptop(), sglang={"sglang": Package(version="0.5.9"), "sglang-router": ABSENT}),
            "SGLang",
            "sglang==0.5.23",
        ),
        (replace(h100(), topology=PCIE_TOPOLOGY), "GPU links", "layout.pipeline"),
        (replace(laptop(), shared_memory=None), "/dev/shm", "--shm-size"),
        (
            replace(laptop(), shared_memory=Space(path="", total_bytes=2**26, free_bytes=2**26)),
            "/dev/shm",
            "--ipc=host",
        ),
        (replace(laptop(), open_files=(1024, 4096)), "open files", "ulimit -n 4096"),
        (replace(h100(), cgroup_cores=2.0), "CPU cores", "--cpus-per-task"),
        (replace(laptop(), cgroup_memory_bytes=2 * GIB), "memory", "docker --memory"),
        (replace(laptop(), disk=Space(path="/", total_bytes=GIB, free_bytes=0)), "disk", "room"),
    ],
)
def test_what_is_slow_or_risky_is_a_warning(facts: Facts, part: str, words: str) -> None:
    finding = findings(facts)[part]
    assert finding.status == "warning"
    assert words in finding.remedy
    assert exit_code(findings(facts).values()) == 0


def test_pypis_apex_is_told_from_nvidias() -> None:
    other = Package(version="0.9.10.dev0", details={"is_nvidia": False})
    finding = software.check_apex(with_packages(laptop(), apex=other))
    assert finding.status == "warning"
    assert finding.found == "PyPI's apex 0.9.10.dev0, another program"
    assert finding.remedy.startswith("pip uninstall apex")
    # It may be what keeps Megatron-Core from being imported.
    broken = with_packages(laptop(), apex=other, megatron_core=Package(problem="SyntaxError"))
    assert "pip uninstall apex" in software.check_megatron(broken).remedy


def test_apex_without_its_extensions_is_a_warning() -> None:
    bare = Package(version="0.1", details={"is_nvidia": True, "parts": []})
    finding = software.check_apex(with_packages(h100(), apex=bare))
    assert (finding.status, finding.found) == ("warning", "0.1, Python only")


def test_a_version_tested_with_another_python_is_said() -> None:
    newer = with_packages(laptop(), megatron_core=Package(version="0.19.2"))
    assert software.check_megatron(newer).used == "tested with another Python"
    on_312 = replace(newer, python="3.12.3")
    assert software.check_megatron(on_312).used == "tested"


def test_control_groups_limit_cores_and_memory() -> None:
    facts = replace(laptop(), cgroup_cores=2.5, cgroup_memory_bytes=8 * GIB)
    assert (facts.usable_cores, facts.usable_memory_bytes) == (2.5, 8 * GIB)
    assert hardware.check_cores(facts).found == "8, of which the control group allows 2.5"
    assert "limit 8.6 GB" in hardware.check_memory(facts).found


def test_topology_of_nvlink_and_of_pcie() -> None:
    dgx = parse_topology(DGX_TOPOLOGY)
    assert dgx is not None
    assert dgx.links == {(0, 1): "NV18", (0, 2): "NV18", (1, 2): "NV18"}
    assert (dgx.num_adapters, dgx.is_all_nvlink) == (2, True)
    pcie = parse_topology(PCIE_TOPOLOGY)
    assert pcie is not None
    assert (pcie.links, pcie.has_slow_links) == ({(0, 1): "SYS"}, True)
    assert parse_topology("Failed to initialize NVML") is None


def test_gpus_of_nvidia_smi() -> None:
    ran = Ran(code=0, stdout="NVIDIA H200, 143771, 570.1\nNVIDIA H200, 143771, 570.1\n")
    gpus, problem = system.parse_gpus(ran)
    assert problem is None
    assert gpus[1] == GpuFacts(name="NVIDIA H200", memory_bytes=143771 * 2**20, driver="570.1")
    failed = Ran(code=9, stdout="NVIDIA-SMI has failed because it could not talk to the driver.")
    assert system.parse_gpus(failed) == ((), f"nvidia-smi: {failed.stdout}")


def test_control_groups_of_both_versions(tmp_path: Path) -> None:
    assert system.read_cgroup_cores(tmp_path) is None
    assert system.read_cgroup_memory(tmp_path) is None
    two, one = tmp_path / "2/sys/fs/cgroup", tmp_path / "1/sys/fs/cgroup"
    for directory in (two, one / "cpu", one / "memory"):
        directory.mkdir(parents=True)
    (two / "cpu.max").write_text("150000 100000\n")
    (two / "memory.max").write_text("1073741824\n")
    assert system.read_cgroup_cores(tmp_path / "2") == 1.5
    assert system.read_cgroup_memory(tmp_path / "2") == GIB
    (two / "cpu.max").write_text("max 100000\n")
    (two / "memory.max").write_text("max\n")
    assert system.read_cgroup_cores(tmp_path / "2") is None
    assert system.read_cgroup_memory(tmp_path / "2") is None
    (one / "cpu/cpu.cfs_quota_us").write_text("400000\n")
    (one / "cpu/cpu.cfs_period_us").write_text("100000\n")
    (one / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert system.read_cgroup_cores(tmp_path / "1") == 4
    assert system.read_cgroup_memory(tmp_path / "1") is None
    (one / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    assert system.read_cgroup_cores(tmp_path / "1") is None


def test_memory_and_infiniband(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  2048 kB\nMemAvailable:  1024 kB\n")
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert system.read_memory(tmp_path) == (2048 * 1024, 1024 * 1024)
    assert system.read_infiniband(tmp_path) == ("mlx5_0",)
    assert system.read_memory(tmp_path / "none") == (0, 0)
    assert system.read_infiniband(tmp_path / "none") == ()


@pytest.mark.parametrize(
    ("ran", "package"),
    [
        (Ran(code=0, stdout=f'noise\n{MARK}{{"version": "1"}}\n'), Package(version="1")),
        (Ran(code=0, stdout=f'{MARK}{{"is_installed": false}}\n'), ABSENT),
        (Ran(code=1, stderr="Traceback\nOSError: x\n"), Package(problem="OSError: x")),
        (Ran(code=-11), Package(problem="importing it ended by SIGSEGV")),
        (Ran(code=0), Package(problem="importing it ended with 0")),
        (
            Ran(code=None, stderr="gave no answer within 1 s"),
            Package(problem="gave no answer within 1 s"),
        ),
    ],
)
def test_how_a_probe_ends(ran: Ran, package: Package) -> None:
    assert system.read_answer(ran) == package


@pytest.mark.parametrize(
    ("source", "package"),
    [
        ("raise ImportError('no libcuda')", Package(problem="ImportError: no libcuda")),
        ("import os; os.abort()", Package(problem="importing it ended by SIGABRT")),
        ("import time; time.sleep(60)", Package(problem="gave no answer within 2 s")),
        ("", Package(version=None)),
    ],
)
def test_a_broken_package_is_reported(
    source: str, package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvtx.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    timeout_s = 2.0 if "sleep" in source else 60.0
    assert system.probe_package(sys.executable, "nvtx", timeout_s) == package


def test_real_packages_are_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert system.probe_package(sys.executable, "flash-attn", 60.0) == ABSENT
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    other = system.probe_package(sys.executable, "apex", 60.0)
    assert other.details == {"is_nvidia": False}
    (tmp_path / "apex/multi_tensor_apply").mkdir()
    (tmp_path / "apex/__init__.py").write_text("")
    (tmp_path / "amp_C.py").write_text("")
    nvidia = system.probe_package(sys.executable, "apex", 60.0)
    assert nvidia.details == {"is_nvidia": True, "parts": ["amp_C"]}


def test_an_interpreter_that_is_none_is_reported() -> None:
    package = system.probe_package("/nowhere/python", "sglang", 5.0)
    assert package.problem == "cannot be started (No such file or directory)"


def test_the_table_and_the_json_say_the_same() -> None:
    sections = {"software": software.software_findings(with_packages(laptop(), torch=ABSENT))}
    console = Console(width=120, color_system=None)
    with console.capture() as captured:
        print_findings(sections, console)
    assert "training cannot run here: torch" in captured.get()
    tree = json.loads(json.dumps(to_json(sections)))
    assert tree["can_train"] is False
    assert tree["findings"][1]["part"] == "torch"
    assert tree["findings"][1] | {"remedy": ""} == {
        **{"section": "software", "part": "torch", "status": "broken"},
        **{"found": "not installed", "used": "", "remedy": ""},
    }


@pytest.mark.parametrize(
    ("facts", "code"), [(laptop(), 0), (with_packages(laptop(), torch=ABSENT), 1)]
)
def test_the_command_ends_with_the_findings_code(
    facts: Facts,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "read_facts", lambda **_: facts)
    monkeypatch.setattr(sys, "argv", ["p3o", "doctor", "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert int(ended.value.code or 0) == code
    assert json.loads(capsys.readouterr().out)["can_train"] is (code == 0)


@pytest.mark.parametrize("words", [["--dry-run"], ["--resume"], ["--run.dir", "x"]])
def test_words_of_a_run_need_one(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "read_facts", lambda **_: laptop())
    monkeypatch.setattr(sys, "argv", ["p3o", "doctor", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("p3o: ") and "Traceback" not in error
