"""Findings about the machine."""

from megatron_p3o.doctor.facts import Facts
from megatron_p3o.doctor.findings import Finding, gigabytes
from megatron_p3o.doctor.topology import parse_topology

# NCCL's buffers between processes of a node, and torch's shared tensors.
_LEAST_SHARED_BYTES = 1e9
_LEAST_DISK_BYTES = 10e9
# Each server takes a connection for every sample in flight, 128 by default.
_LEAST_OPEN_FILES = 4096
_LEAST_MEMORY_BYTES = 4e9


def hardware_findings(facts: Facts) -> list[Finding]:
    return [
        check_gpus(facts),
        check_interconnect(facts),
        check_network(facts),
        check_shared_memory(facts),
        check_disk(facts),
        check_open_files(facts),
        check_cores(facts),
        check_memory(facts),
    ]


def check_gpus(facts: Facts) -> Finding:
    if facts.gpu_problem is not None:
        return Finding(
            part="GPUs",
            status="broken",
            found=facts.gpu_problem,
            remedy="mend the driver (after an update, restart); in a container, pass --gpus all",
        )
    if not facts.gpus:
        return Finding(part="GPUs", status="fallback", found="none", used="the CPU")
    kinds = sorted({(gpu.name, gpu.memory_bytes) for gpu in facts.gpus})
    counts = [sum((g.name, g.memory_bytes) == kind for g in facts.gpus) for kind in kinds]
    found = ", ".join(
        f"{count} x {name} {gigabytes(memory)}"
        for count, (name, memory) in zip(counts, kinds, strict=True)
    )
    return Finding(
        part="GPUs",
        status="ok" if len(kinds) == 1 else "warning",
        found=f"{found}, driver {facts.gpus[0].driver}",
        used=f"{facts.torch_gpus} of {len(facts.gpus)}",
        remedy=""
        if len(kinds) == 1
        else "choose equal ones with CUDA_VISIBLE_DEVICES; ranks wait for the slowest",
    )


def check_interconnect(facts: Facts) -> Finding:
    part = "GPU links"
    if len(facts.gpus) < 2:
        return Finding(part=part, status="ok", found="one GPU or none", used="nothing")
    topology = parse_topology(facts.topology or "")
    if topology is None:
        return Finding(part=part, status="warning", found="nvidia-smi topo -m does not say")
    found = ", ".join(topology.kinds)
    if topology.is_all_nvlink:
        return Finding(part=part, status="ok", found=found, used="NVLink")
    return Finding(
        part=part,
        status="warning",
        found=found,
        used="PCIe" + (", through the CPU" if topology.has_slow_links else ""),
        remedy="keep layout.tensor within GPUs that NVLink joins, else use layout.pipeline",
    )


def check_network(facts: Facts) -> Finding:
    if facts.infiniband:
        return Finding(
            part="InfiniBand",
            status="ok",
            found=", ".join(facts.infiniband),
            used="between nodes, by NCCL",
        )
    return Finding(
        part="InfiniBand",
        status="fallback",
        found="none in /sys/class/infiniband",
        used="TCP between nodes; set NCCL_SOCKET_IFNAME if there are several networks",
    )


def check_shared_memory(facts: Facts) -> Finding:
    space = facts.shared_memory
    remedy = "in a container, pass --shm-size=16g or --ipc=host; else remount /dev/shm"
    if space is None:
        return Finding(part="/dev/shm", status="warning", found="none", remedy=remedy)
    is_enough = space.free_bytes >= _LEAST_SHARED_BYTES
    return Finding(
        part="/dev/shm",
        status="ok" if is_enough else "warning",
        found=f"{gigabytes(space.free_bytes)} free of {gigabytes(space.total_bytes)}",
        used="between processes of this node",
        remedy="" if is_enough else remedy,
    )


def check_disk(facts: Facts) -> Finding:
    space = facts.disk
    is_enough = space.free_bytes >= _LEAST_DISK_BYTES
    return Finding(
        part="disk",
        status="ok" if is_enough else "warning",
        found=f"{gigabytes(space.free_bytes)} free at {space.path}",
        used="run dirs and checkpoints",
        remedy="" if is_enough else "make room; p3o doctor RUN.yaml says how much a run needs",
    )


def check_open_files(facts: Facts) -> Finding:
    soft, hard = facts.open_files
    is_enough = soft < 0 or soft >= _LEAST_OPEN_FILES
    return Finding(
        part="open files",
        status="ok" if is_enough else "warning",
        found=f"limit {_limit(soft)}, may be raised to {_limit(hard)}",
        used="a socket for every sample in flight",
        remedy="" if is_enough else f"ulimit -n {_limit(hard)} before p3o train",
    )


def _limit(value: int) -> str:
    return "unlimited" if value < 0 else str(value)


def check_cores(facts: Facts) -> Finding:
    limited = facts.cgroup_cores is not None and facts.cgroup_cores < facts.num_cores
    few = facts.torch_gpus > facts.usable_cores
    found = f"{facts.num_cores}"
    if limited:
        found += f", of which the control group allows {facts.cgroup_cores:g}"
    return Finding(
        part="CPU cores",
        status="warning" if few else "ok",
        found=found,
        used=f"{facts.usable_cores:g}",
        remedy="ask for at least one core for each GPU (Slurm: --cpus-per-task)" if few else "",
    )


def check_memory(facts: Facts) -> Finding:
    limit = facts.cgroup_memory_bytes
    found = f"{gigabytes(facts.available_bytes)} available of {gigabytes(facts.memory_bytes)}"
    if limit is not None and limit < facts.memory_bytes:
        found += f", control group's limit {gigabytes(limit)}"
    is_enough = facts.usable_memory_bytes >= _LEAST_MEMORY_BYTES or facts.memory_bytes == 0
    return Finding(
        part="memory",
        status="ok" if is_enough else "warning",
        found=found if facts.memory_bytes else "unknown (no /proc/meminfo)",
        used="models while they load, copies of checkpoints",
        remedy="" if is_enough else "free memory, or ask for more (docker --memory, Slurm --mem)",
    )
