"""Versions that the test suite ran with; docs/support.md lists the same ones. Imports nothing."""

from typing import NamedTuple


class TestedSet(NamedTuple):
    """Versions that were tested together."""

    python: str
    torch: str
    megatron_core: str
    transformers: str


TRAINERS = (
    TestedSet("3.11.7", "2.13.0", "0.16.1", "5.24"),
    TestedSet("3.12.1", "2.11.0", "0.19.2", "5.24"),
)
SGLANG = ("0.5.23",)
SGLANG_ROUTER = ("0.3.2",)
