"""The documents are true: links lead somewhere, fields and commands exist, pages are current."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_p3o.config import json_schema, parse_config

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("examples/*/*.md")])
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
MINIMAL = {
    "run": {"dir": "runs/x"},
    "model": {"path": "models/x"},
    "data": {"source": "generator", "generator": "arithmetic"},
    "train": {"steps": 1, "prompts_per_step": 1, "samples_per_prompt": 2},
}


def known_fields() -> set[str]:
    """The fields that docs/configuration.md lists; another test keeps that page current."""
    return set(re.findall(r"^\| `([a-z0-9_.]+)` \|", read(ROOT / "docs/configuration.md"), re.M))


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_the_pages_are_found() -> None:
    assert {"README.md", "CONTRIBUTING.md", "docs/support.md", "docs/dependencies.md"} <= set(IDS)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", read(page)):
        if not target.startswith(("https://", "#")):
            assert (page.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_named_files_exist(page: Path) -> None:
    roots = r"(?:megatron_p3o|examples|tools|tests|benchmarks|docs)"
    for name in re.findall(rf"(?<![\w/]){roots}/[\w/]+\.\w+", read(page)):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_named_fields_exist(page: Path) -> None:
    sections = "|".join({field.partition(".")[0] for field in known_fields()})
    fields = known_fields()
    for name in re.findall(rf"(?:`|--)((?:{sections})\.[a-z0-9_]+(?:\.[a-z0-9_]+)*)", read(page)):
        # A field may be the head of a subsection: data.reward.
        assert any(f == name or f.startswith(name + ".") for f in fields), name


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", read(ROOT / "Makefile"), re.M))
    assert set(re.findall(r"^ {4}make ([a-z]+)", read(page), re.M)) <= targets


def test_commands_exist() -> None:
    text = "\n".join(map(read, PAGES))
    commands = set(re.findall(r"^ {4}p3o ([a-z]+)", text, re.M))
    assert {"train", "check", "schema"} <= commands
    for command in commands:
        subprocess.run(
            [sys.executable, "-m", "megatron_p3o.cli", command, "--help"],
            check=True,
            capture_output=True,
            timeout=60,
        )


def test_the_configuration_page_is_current() -> None:
    printed = subprocess.run(
        [sys.executable, str(ROOT / "tools/config_reference.py")],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    assert printed == read(ROOT / "docs/configuration.md"), (
        "run: python tools/config_reference.py > docs/configuration.md"
    )


def test_the_configuration_page_has_every_section_and_the_right_defaults() -> None:
    page = read(ROOT / "docs/configuration.md")
    config = parse_config(MINIMAL)
    for section in type(config).model_fields:
        assert f"## {section}\n" in page
    assert f"| `optimizer.lr` | number > 0 | `{config.optimizer.lr}` |" in page
    assert '| `ess.scope` | `step`, `microbatch` | `"step"` |' in page
    assert "RunConfig" in json_schema()


def test_every_dependency_has_its_reason() -> None:
    page = read(ROOT / "docs/dependencies.md")
    names = re.findall(r'^    "([A-Za-z][A-Za-z-]*)[\[>="]', read(ROOT / "pyproject.toml"), re.M)
    assert {"torch", "pydantic", "pytest"} <= set(names)
    for name in names:
        assert name in page, name
