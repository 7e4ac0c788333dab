"""How GPUs are connected, from the table that `nvidia-smi topo -m` prints.

NV18   18 NVLinks      PIX, PXB   PCIe bridges      PHB   through the CPU
NODE   within one NUMA node       SYS   between NUMA nodes
"""

import re
from dataclasses import dataclass

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_SLOW = ("PHB", "NODE", "SYS")


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Of every pair of GPUs, and how many network adapters stand in the table."""

    links: dict[tuple[int, int], str]
    num_adapters: int

    @property
    def kinds(self) -> list[str]:
        """Of links, each once."""
        return sorted(set(self.links.values()))

    @property
    def is_all_nvlink(self) -> bool:
        return bool(self.links) and all(kind.startswith("NV") for kind in self.links.values())

    @property
    def has_slow_links(self) -> bool:
        return any(kind in _SLOW for kind in self.links.values())


def parse_topology(text: str) -> Topology | None:
    """None when it is no such table."""
    lines = [_ESCAPES.sub("", line).split() for line in text.splitlines()]
    headers = [words for words in lines if words[:1] == ["GPU0"] and "X" not in words[:2]]
    if not headers:
        return None
    columns = [word for word in headers[0] if re.fullmatch(r"(GPU|NIC|mlx5_)\d+", word)]
    links = {}
    for words in lines:
        if len(words) <= len(columns) or words[0] not in columns or not words[0].startswith("GPU"):
            continue
        row = int(words[0].removeprefix("GPU"))
        for name, kind in zip(columns, words[1:], strict=False):
            if name.startswith("GPU") and (column := int(name.removeprefix("GPU"))) > row:
                links[row, column] = kind
    return Topology(links=links, num_adapters=sum(not c.startswith("GPU") for c in columns))
