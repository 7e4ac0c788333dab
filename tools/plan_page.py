"""Bring the outputs in docs/plan.md up to date: each ``` block behind an indented `p3o plan` line.

    python tools/plan_page.py            # rewrites docs/plan.md
    python tools/plan_page.py --print    # prints what it would be

The models' config.json come from tests/golden, by the last part of model.path.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from megatron_p3o.config import load_config

ROOT = Path(__file__).parents[1]
_PAGE = ROOT / "docs" / "plan.md"
_BLOCK = re.compile(r"^ {4}p3o plan (?P<words>.+)\n\n```\n(?P<output>(?:.*\n)*?)```$", re.MULTILINE)


def output_of(words: list[str]) -> str:
    """What `p3o plan` prints."""
    name = Path(load_config(ROOT / words[0]).model.path).name
    model = ["--model.path", str(ROOT / "tests" / "golden" / name)]
    return subprocess.run(
        [sys.executable, "-m", "megatron_p3o.cli", "plan", *words, *model],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout


def current(page: str) -> str:
    """The page with every output as it is now."""

    def replace(match: re.Match[str]) -> str:
        words = match["words"]
        return f"    p3o plan {words}\n\n```\n{output_of(shlex.split(words))}```"

    return _BLOCK.sub(replace, page)


def main() -> None:
    page = current(_PAGE.read_text(encoding="utf-8"))
    if "--print" in sys.argv[1:]:
        print(page, end="")
    else:
        _PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
