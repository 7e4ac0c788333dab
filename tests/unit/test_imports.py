"""The layering: which part may import which, read from the source."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "megatron_p3o"
# What a part may import of ours, besides itself.
LEAVES = {
    *("types", "config", "errors", "architecture", "model_files", "parent", "numerics"),
    "tested_versions",
}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "parent": set(),
    "api_key": {"config", "errors"},
    "tested_versions": set(),
    "types": set(),
    "numerics": set(),
    "config": {"errors"},
    "model_files": {"errors"},
    "architecture": {"errors", "model_files"},
    "algorithms": {"types", "config", "errors"},
    "weights": LEAVES,
    "rollout": LEAVES,
    "parallel": LEAVES | {"run_dir"},
    "data": LEAVES,
    "run_dir": LEAVES,
    "splitting": {"architecture", "config", "errors"},
    "fp8_shapes": {"architecture", "config", "errors"},
    "plan": {"architecture", "config", "errors", "model_files", "parallel", "splitting"},
    "targets": {"architecture", "config", "data", "errors", "model_files", "run_dir", "weights"},
    "evaluation": {
        *("api_key", "architecture", "config", "data", "errors", "model_files"),
        *("rollout", "run_dir", "targets", "weights"),
    },
    "preflight": LEAVES | {"api_key", "data", "fp8_shapes", "run_dir", "splitting"},
    "trainer": LEAVES
    | {"algorithms", "weights", "rollout", "parallel", "data", "run_dir", "preflight", "api_key"}
    | {"evaluation"},
    "study": {"config", "errors", "parent", "run_dir"},
    "inspect_run": {"config", "errors", "run_dir"},
    "probe": {
        *("algorithms", "architecture", "config", "data", "errors", "model_files"),
        *("rollout", "run_dir", "targets", "weights"),
    },
    "doctor": {
        *("api_key", "config", "errors", "parallel", "plan", "preflight", "run_dir"),
        "tested_versions",
    },
    "cli": LEAVES
    | {
        "doctor",
        "evaluation",
        "inspect_run",
        "plan",
        "preflight",
        "probe",
        "study",
        "trainer",
        "weights",
    },
}
WITHOUT_TORCH = (
    "errors",
    "api_key",
    "config",
    "model_files",
    "splitting",
    "fp8_shapes",
    "run_dir",
    "data",
    "evaluation.command",
    "evaluation.report",
    "plan",
    "preflight",
    "doctor.command",
    "inspect_run.commands",
    "inspect_run.samples",
    "inspect_run.show",
    "inspect_run.watch",
    "probe.command",
    "study.commands",
    "study.report",
    "cli",
)


def sources(part: str) -> list[Path]:
    """The Python files of `megatron_p3o/<part>.py` or `megatron_p3o/<part>/`."""
    return [*PACKAGE.glob(f"{part}.py"), *(PACKAGE / part).rglob("*.py")]


def imports(path: Path) -> Iterator[list[str]]:
    """The dotted names that a file imports, inside functions too, split at their dots."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides which part it uses"
            yield from (f"{node.module}.{alias.name}".split(".") for alias in node.names)


def test_the_table_speaks_of_every_part() -> None:
    parts = {path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py")}
    assert {part.removesuffix(".py") for part in parts} - {"__init__"} == MAY_IMPORT.keys()


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_a_part_imports_only_what_it_may(part: str) -> None:
    for path in sources(part):
        ours = {name[1] for name in imports(path) if name[0] == "megatron_p3o" and len(name) > 1}
        assert ours - {part} <= MAY_IMPORT[part], path


def test_only_parallel_imports_megatron() -> None:
    importing = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        for name in imports(path)
        if name[0] == "megatron"
    }
    assert importing == {"parallel"}


def test_algorithms_need_torch_alone() -> None:
    roots = {name[0] for path in sources("algorithms") for name in imports(path)}
    assert roots - sys.stdlib_module_names == {"torch", "megatron_p3o"}


def test_configuration_and_checks_load_without_torch() -> None:
    modules = ", ".join(f"megatron_p3o.{name}" for name in WITHOUT_TORCH)
    code = f"import sys, {modules}; print(sorted({{'torch', 'megatron'}} & sys.modules.keys()))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "[]"


def test_every_test_file_is_collected() -> None:
    root = PACKAGE.parent
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "tests", "--collect-only", "-q"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    collected = {line.partition(":")[0] for line in result.stdout.splitlines()}
    files = {str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py")}
    assert files - collected == set()
