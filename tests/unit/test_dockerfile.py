"""The Dockerfile, read: pins agree with the rest, and hadolint's well-known rules hold."""

import json
import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_p3o import tested_versions

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
SUPPORT = (ROOT / "docs/support.md").read_text()


@dataclass
class Stage:
    image: str
    instructions: list[tuple[str, str]] = field(default_factory=list)
    """(keyword, rest), comments left out and lines joined."""

    def all(self, keyword: str) -> list[str]:
        return [rest for word, rest in self.instructions if word == keyword]

    @property
    def arguments(self) -> dict[str, str]:
        return dict(rest.split("=", 1) for rest in self.all("ARG"))


def parse(text: str) -> tuple[dict[str, str], dict[str, Stage]]:
    """Arguments before the first FROM, and stages by name."""
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    before: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    current: Stage | None = None
    for line in re.sub(r"\s*\\\n\s*", " ", kept).splitlines():
        if not line.strip():
            continue
        keyword, _, rest = line.partition(" ")
        if keyword == "FROM":
            image, _, name = rest.partition(" AS ")
            for argument, value in before.items():
                image = image.replace(f"${{{argument}}}", value)
            current = stages.setdefault(name, Stage(image))
        elif current is None:
            assert keyword == "ARG", line
            name, _, value = rest.partition("=")
            before[name] = value
        else:
            current.instructions.append((keyword, rest.strip()))
    return before, stages


BEFORE, STAGES = parse(TEXT)
GPU, CPU = STAGES["gpu"], STAGES["cpu"]


def rows(first: str) -> dict[str, str]:
    """The row of docs/support.md that starts so, by column."""
    lines = SUPPORT.splitlines()
    number = next(n for n, line in enumerate(lines) if line.startswith(f"| {first} |"))
    head = max(n for n in range(number) if lines[n + 1].startswith("|---"))
    names, values = ([w.strip() for w in lines[n].split("|")[1:-1]] for n in (head, number))
    return dict(zip(names, values, strict=True))


def test_the_parser_joins_lines_and_leaves_comments_out() -> None:
    before, stages = parse("ARG T=1\n# c\nFROM a:${T} AS b\nRUN x \\\n    # c\n    && y\n")
    assert before == {"T": "1"}
    assert stages == {"b": Stage("a:1", [("RUN", "x && y")])}


def test_both_targets_exist() -> None:
    assert list(STAGES) == ["gpu", "cpu"]
    assert GPU.image == "nvcr.io/nvidia/pytorch:26.05-py3"
    assert CPU.image == "python:3.11-slim-bookworm"


def test_pins_agree_with_the_table_of_tested_versions() -> None:
    gpu, cpu = rows("`gpu`"), rows("`cpu`")
    arguments = GPU.arguments
    assert gpu["From"] == GPU.image
    assert cpu["From"] == CPU.image
    assert gpu["megatron-core"] == arguments["MEGATRON_CORE"]
    assert gpu["SGLang"] == arguments["SGLANG"] in tested_versions.SGLANG
    assert gpu["sglang-router"] == arguments["SGLANG_ROUTER"] in tested_versions.SGLANG_ROUTER
    assert gpu["Apex"].startswith(arguments["APEX_COMMIT"] + ",")
    assert re.fullmatch(r"[0-9a-f]{40}", arguments["APEX_COMMIT"])
    assert arguments["APEX"] == "0"


def test_tested_versions_are_those_of_the_page_and_of_the_tools() -> None:
    for python, torch, megatron, transformers in tested_versions.TRAINERS:
        assert f"| {python} | {torch} | {megatron} | {transformers} |" in SUPPORT
    setup = (ROOT / "tools/setup_sglang_cpu.sh").read_text()
    assert f"sglang=={tested_versions.SGLANG[-1]} " in setup
    assert f"sglang-router=={tested_versions.SGLANG_ROUTER[-1]} " in setup


def test_megatron_core_is_what_pyproject_allows() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    exact = re.search(r"\"megatron-core==([\d.]+); python_version < '3.12'\"", project)
    bounds = re.search(r"megatron-core>=([\d.]+),<([\d.]+); python_version >= '3.12'", project)
    assert exact and bounds

    def numbers(version: str) -> tuple[int, ...]:
        return tuple(map(int, version.split(".")))

    # The GPU image has Python 3.12, the CPU image 3.11.
    assert numbers(bounds[1]) <= numbers(GPU.arguments["MEGATRON_CORE"]) < numbers(bounds[2])
    assert rows("`cpu`")["megatron-core"] == exact[1]
    tested = {row.python[:4]: row.megatron_core for row in tested_versions.TRAINERS}
    assert tested == {"3.11": exact[1], "3.12": GPU.arguments["MEGATRON_CORE"]}


def test_the_install_page_names_the_same_pins() -> None:
    page = (ROOT / "docs/install.md").read_text()
    pins = set(re.findall(r"(sglang|sglang-router|megatron-core|torch)==([\d.]+)", page))
    assert pins == {
        ("sglang", GPU.arguments["SGLANG"]),
        ("sglang-router", GPU.arguments["SGLANG_ROUTER"]),
        ("megatron-core", GPU.arguments["MEGATRON_CORE"]),
        ("torch", "2.11.0"),
        ("torch", "2.13.0"),
    }
    assert f"| `NGC_TAG` | {BEFORE['NGC_TAG']} |" in page
    assert GPU.arguments["APEX_COMMIT"] in page


@pytest.mark.parametrize("name", STAGES)
def test_common_rules(name: str) -> None:
    stage = STAGES[name]
    _, colon, tag = stage.image.rpartition(":")
    assert colon and tag and "latest" not in TEXT  # DL3006, DL3007
    assert "sudo" not in TEXT  # DL3004
    assert not stage.all("ADD")  # DL3020
    assert stage.all("USER")[-1] == "p3o"  # DL3002
    assert "pipefail" in json.loads(stage.all("SHELL")[0])  # DL4006
    assert all(Path(path).is_absolute() for path in stage.all("WORKDIR"))  # DL3000
    assert all(" cd " not in f" {run} " for run in stage.all("RUN"))  # DL3003
    words = [keyword for keyword, _ in stage.instructions]
    assert ("RUN", "RUN") not in pairwise(words)  # DL3059
    for keyword in ("ENTRYPOINT", "CMD"):  # DL3025, DL4003, DL4004
        (instruction,) = stage.all(keyword)
        assert isinstance(json.loads(instruction), list)
    assert json.loads(stage.all("ENTRYPOINT")[0]) == ["p3o"]
    assert json.loads(stage.all("CMD")[0])[0] == "doctor"


@pytest.mark.parametrize("name", STAGES)
def test_installers_leave_nothing_behind(name: str) -> None:
    for run in STAGES[name].all("RUN"):
        if "apt-get install" in run:
            assert "--no-install-recommends" in run  # DL3015
            assert "--yes" in run  # DL3014
            assert "rm -rf /var/lib/apt/lists/*" in run  # DL3009
            assert run.startswith("apt-get update")
        for command in re.findall(r"pip install (.*?)(?: && |;|$)", run):
            assert "--no-cache-dir" in command  # DL3042
            packages = [word for word in command.split() if not word.startswith("--")]
            for package in re.findall(r'"([^"]+)"', command) or packages:
                assert "==" in package or "@${" in package or package.startswith("."), package


@pytest.mark.parametrize("name", STAGES)
def test_variables_of_the_shell_are_quoted(name: str) -> None:
    for run in STAGES[name].all("RUN"):  # SC2086
        outside = re.sub(r"\"[^\"]*\"|'[^']*'", "", run)
        assert "$" not in outside.replace("torch=$(python -c )", ""), run


def test_the_cpu_image_is_what_make_does() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    steps = [run for run in CPU.all("RUN") if not run.startswith("apt-get")]
    assert steps == ["make venv model", 'if [ "${SGLANG}" = 1 ]; then make sglang; fi']
    assert {"venv", "model", "sglang"} <= targets
    (path,) = [value for value in CPU.all("ENV") if value.startswith("PATH=")]
    assert path.startswith("PATH=/opt/megatron-p3o/.venv-3.11/bin:")
    assert CPU.all("WORKDIR") == ["/opt/megatron-p3o"]


def test_what_is_copied_exists() -> None:
    for copy in GPU.all("COPY"):
        for name in copy.split()[:-1]:
            assert (ROOT / name).exists(), name


def test_what_is_made_is_not_copied() -> None:
    ignored = set((ROOT / ".dockerignore").read_text().splitlines())
    assert {".git", ".venv*", "models", "runs", "**/__pycache__"} <= ignored
