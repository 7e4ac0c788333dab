"""Reads this machine. Nothing is written, and nothing here can crash on a broken package."""

import importlib.resources
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megatron_p3o.doctor.facts import ABSENT, Facts, GpuFacts, Package, Space
from megatron_p3o.doctor.package_probe import MARK

_OURS = (
    *("torch", "megatron-core", "transformer-engine", "apex", "flash-attn", "transformers"),
    *("ray", "nvtx", "dlprof"),
)
_SGLANG = ("sglang", "sglang-router")
_GPU_QUERY = "name,memory.total,driver_version"
_TOOL_TIMEOUT_S = 30.0
_MIB = 2**20
# Control groups of version 1 write "no limit" as the greatest number of pages.
_NO_LIMIT = 2**60


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """How a program ended."""

    code: int | None
    """None: it was ended since it took too long, or could not be started."""
    stdout: str = ""
    stderr: str = ""


def run_program(words: Sequence[str], timeout_s: float, *, without: Sequence[str] = ()) -> Ran:
    """Run it to its end.

    Args:
        words: the command.
        timeout_s: after which it is ended.
        without: environment variables that it shall not see.
    """
    environment = {name: value for name, value in os.environ.items() if name not in without}
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return Ran(code=None, stderr=f"gave no answer within {timeout_s:g} s")
    except OSError as error:
        return Ran(code=None, stderr=f"cannot be started ({error.strerror})")
    return Ran(code=done.returncode, stdout=done.stdout, stderr=done.stderr)


def read_facts(*, sglang_python: str | None, disk: Path, timeout_s: float) -> Facts:
    """
    Args:
        sglang_python: interpreter of SGLang's environment; None: this one.
        disk: a path that will be written to; it need not exist.
        timeout_s: for each package to be imported.
    """
    interpreter = sglang_python or sys.executable
    # One at a time on each core: several at once would only push each other over the deadline.
    with ThreadPoolExecutor(max_workers=max(1, min(4, os.cpu_count() or 1))) as pool:
        ours = {n: pool.submit(probe_package, sys.executable, n, timeout_s) for n in _OURS}
        theirs = {n: pool.submit(probe_package, interpreter, n, timeout_s) for n in _SGLANG}
        gpus, gpu_problem = read_gpus()
        packages = {name: future.result() for name, future in ours.items()}
        sglang = {name: future.result() for name, future in theirs.items()}
    root = Path("/")
    memory, available = read_memory(root)
    return Facts(
        python=platform.python_version(),
        interpreter=sys.executable,
        packages=packages,
        sglang_interpreter=interpreter,
        sglang=sglang,
        is_sglang_wanted=sglang_python is not None,
        gpus=gpus,
        gpu_problem=gpu_problem,
        topology=read_topology() if len(gpus) > 1 else None,
        infiniband=read_infiniband(root),
        shared_memory=space_at(Path("/dev/shm")) if Path("/dev/shm").is_dir() else None,
        disk=space_at(disk),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        num_cores=count_cores(),
        cgroup_cores=read_cgroup_cores(root),
        memory_bytes=memory,
        available_bytes=available,
        cgroup_memory_bytes=read_cgroup_memory(root),
        nsys=shutil.which("nsys"),
    )


def probe_package(interpreter: str, name: str, timeout_s: float) -> Package:
    """Import a package in a process of its own."""
    program = importlib.resources.files("megatron_p3o.doctor") / "package_probe.py"
    words = [interpreter, "-c", program.read_text(encoding="utf-8"), name]
    # Another environment's packages are not those of this one's path; servers start without it too.
    without = () if interpreter == sys.executable else ("PYTHONPATH", "PYTHONHOME")
    return read_answer(run_program(words, timeout_s, without=without))


def read_answer(ran: Ran) -> Package:
    """What `package_probe` said, or how it ended."""
    answers = [line for line in ran.stdout.splitlines() if line.startswith(MARK)]
    if ran.code == 0 and answers:
        content = json.loads(answers[-1].removeprefix(MARK))
        return Package(**content) if content.get("is_installed", True) else ABSENT
    if ran.code is not None and ran.code < 0:
        return Package(problem=f"importing it ended by {signal.Signals(-ran.code).name}")
    lines = ran.stderr.strip().splitlines()
    return Package(problem=lines[-1][:300] if lines else f"importing it ended with {ran.code}")


def read_gpus() -> tuple[tuple[GpuFacts, ...], str | None]:
    """The driver's GPUs, and why it does not answer."""
    if shutil.which("nvidia-smi") is None:
        return (), None
    words = ["nvidia-smi", f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader,nounits"]
    return parse_gpus(run_program(words, _TOOL_TIMEOUT_S))


def parse_gpus(ran: Ran) -> tuple[tuple[GpuFacts, ...], str | None]:
    if ran.code != 0:
        said = (ran.stdout + ran.stderr).strip().splitlines() or ["no message"]
        return (), f"nvidia-smi: {said[-1]}"
    gpus = []
    for line in ran.stdout.splitlines():
        fields = [field.strip() for field in line.rsplit(",", 2)]
        if len(fields) != 3 or not fields[1].isdecimal():
            return (), f"nvidia-smi: {line.strip()}"
        gpus.append(GpuFacts(name=fields[0], memory_bytes=int(fields[1]) * _MIB, driver=fields[2]))
    return tuple(gpus), None


def read_topology() -> str | None:
    ran = run_program(["nvidia-smi", "topo", "-m"], _TOOL_TIMEOUT_S)
    return ran.stdout if ran.code == 0 else None


def read_infiniband(root: Path) -> tuple[str, ...]:
    devices = root / "sys/class/infiniband"
    return tuple(sorted(entry.name for entry in devices.iterdir())) if devices.is_dir() else ()


def existing(path: Path) -> Path:
    """The path, or the nearest of its parents that is there."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def space_at(path: Path) -> Space:
    place = existing(path)
    usage = shutil.disk_usage(place)
    return Space(path=str(place), total_bytes=usage.total, free_bytes=usage.free)


def count_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def read_memory(root: Path) -> tuple[int, int]:
    """All memory and what is available, bytes; (0, 0) where /proc does not say."""
    values = dict(_pairs(root / "proc/meminfo"))
    return _kib(values, "MemTotal"), _kib(values, "MemAvailable")


def _pairs(path: Path) -> list[tuple[str, str]]:
    lines = _text(path).splitlines()
    return [(key, value) for key, colon, value in (line.partition(":") for line in lines) if colon]


def _kib(values: Mapping[str, str], name: str) -> int:
    words = values.get(name, "0 kB").split()
    return int(words[0]) * 1024


def read_cgroup_cores(root: Path) -> float | None:
    """Of control groups in version 2, else 1, where the container's are mounted."""
    groups = root / "sys/fs/cgroup"
    words = _text(groups / "cpu.max").split()
    if not words:
        words = [
            _text(groups / f"cpu/cpu.cfs_{name}_us").strip() or "-1" for name in ("quota", "period")
        ]
    quota, period = words[0], words[-1]
    return int(quota) / int(period) if quota.isdecimal() else None


def read_cgroup_memory(root: Path) -> int | None:
    groups = root / "sys/fs/cgroup"
    names = ("memory.max", "memory/memory.limit_in_bytes")
    limit = next((text for text in (_text(groups / name).strip() for name in names) if text), "max")
    return int(limit) if limit.isdecimal() and int(limit) < _NO_LIMIT else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
