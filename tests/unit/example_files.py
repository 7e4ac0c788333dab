"""The configuration files of the examples."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
_FILES = sorted((ROOT / "examples").rglob("*.yaml"))
STUDIES = [path for path in _FILES if path.stem.endswith("study")]
RUNS = [path for path in _FILES if path not in STUDIES]
