"""What was read from a machine, as plain values; tests make up machines with them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """One package in one interpreter.

    Example:
        Package(version="2.13.0", details={"cuda": "13.0", "capabilities": [[9, 0]]})
    """

    version: str | None = None
    """None when the package has no version, or is not there."""
    is_installed: bool = True
    problem: str | None = None
    """Why it cannot be imported."""
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def works(self) -> bool:
        return self.is_installed and self.problem is None


ABSENT = Package(is_installed=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    """One GPU, as the driver sees it."""

    name: str
    memory_bytes: int
    driver: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """Of a file system, bytes."""

    path: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """A machine."""

    python: str
    """Version."""
    interpreter: str
    """Path."""
    packages: Mapping[str, Package]
    """By the names of `package_probe.PACKAGES`; what is left out is not installed."""
    sglang_interpreter: str
    sglang: Mapping[str, Package]
    """SGLang's packages, in its interpreter."""
    is_sglang_wanted: bool = False
    """An interpreter was named for it."""
    gpus: tuple[GpuFacts, ...] = ()
    gpu_problem: str | None = None
    """Why the driver does not answer; None also where there is none."""
    topology: str | None = None
    """As nvidia-smi prints it."""
    infiniband: tuple[str, ...] = ()
    """Devices."""
    shared_memory: Space | None = None
    disk: Space
    open_files: tuple[int, int]
    """Soft and hard limit."""
    num_cores: int
    """That this process may run on."""
    cgroup_cores: float | None = None
    """Cores' worth of time that the control group allows; None: all."""
    memory_bytes: int
    available_bytes: int
    cgroup_memory_bytes: int | None = None
    nsys: str | None = None
    """Path of the program."""

    def package(self, name: str) -> Package:
        return self.packages.get(name, ABSENT)

    @property
    def torch_gpus(self) -> int:
        """GPUs that torch can use."""
        torch = self.package("torch")
        return len(torch.details.get("capabilities", ())) if torch.works else 0

    @property
    def capability(self) -> tuple[int, int] | None:
        """The least of the GPUs that torch can use."""
        if not self.torch_gpus:
            return None
        return min((c[0], c[1]) for c in self.package("torch").details["capabilities"])

    @property
    def usable_cores(self) -> float:
        return min(self.num_cores, self.cgroup_cores or self.num_cores)

    @property
    def usable_memory_bytes(self) -> int:
        """Free now, within the control group's limit."""
        return min(self.available_bytes, self.cgroup_memory_bytes or self.available_bytes)
