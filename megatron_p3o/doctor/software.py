"""Findings about packages: what is there, what is used, what stands in, what to do."""

from megatron_p3o import tested_versions
from megatron_p3o.doctor.facts import Facts, Package
from megatron_p3o.doctor.findings import Finding
from megatron_p3o.doctor.package_probe import APEX_PARTS
from megatron_p3o.parallel.fp8_support import LEAST_CAPABILITY, missing_support

_LEAST_PYTHON = (3, 11)
_LEAST_TORCH = (2, 11)
_INSTALL = "pip install 'megatron-p3o' into this interpreter's environment (docs/install.md)"


def software_findings(facts: Facts) -> list[Finding]:
    return [
        check_python(facts),
        check_torch(facts),
        check_cuda(facts),
        check_nccl(facts),
        check_megatron(facts),
        check_transformers(facts),
        check_transformer_engine(facts),
        check_fp8(facts),
        check_apex(facts),
        check_flash_attention(facts),
        check_sglang(facts),
        check_router(facts),
        check_ray(facts),
        check_profilers(facts),
    ]


def check_python(facts: Facts) -> Finding:
    tested = [_minor(row.python) for row in tested_versions.TRAINERS]
    found = f"{facts.python}, {facts.interpreter}"
    if _numbers(facts.python) < _LEAST_PYTHON:
        return Finding(
            part="Python",
            status="broken",
            found=found,
            remedy="use Python 3.11 or newer: make PYTHON=/path/to/python3.11",
        )
    return Finding(part="Python", status="ok", found=found, used=_tested(facts.python, tested))


def check_torch(facts: Facts) -> Finding:
    package = facts.package("torch")
    if not package.works:
        return _needed("torch", package, _INSTALL)
    if _numbers(package.version) < _LEAST_TORCH:
        return Finding(
            part="torch",
            status="broken",
            found=str(package.version),
            remedy="install torch 2.11 or newer, before everything else",
        )
    if not package.details.get("has_gloo", True):
        return Finding(
            part="torch",
            status="broken",
            found=f"{package.version}, without gloo",
            remedy="install a build with torch.distributed and gloo: ranks talk through it",
        )
    tested = [row.torch for row in tested_versions.TRAINERS]
    return Finding(
        part="torch",
        status="ok",
        found=str(package.version),
        used=_tested(package.version, tested),
    )


def check_cuda(facts: Facts) -> Finding:
    built = facts.package("torch").details.get("cuda")
    if facts.torch_gpus:
        return Finding(
            part="CUDA",
            status="ok",
            found=f"{built}, capability {_dotted(facts.capability)}",
            used=f"{facts.torch_gpus} GPUs, one for each rank",
        )
    if facts.gpus:
        return Finding(
            part="CUDA",
            status="broken",
            found=f"{len(facts.gpus)} GPUs, and torch sees none (its CUDA: {built or 'none'})",
            used="the CPU, for tests only",
            remedy=f"install a CUDA build of torch that driver {facts.gpus[0].driver} can run"
            if built is None
            else "see CUDA_VISIBLE_DEVICES; else update the driver or install a torch built for an "
            "older CUDA",
        )
    return Finding(
        part="CUDA",
        status="fallback",
        found="no GPU",
        used="the CPU with gloo: for small models and tests",
    )


def check_nccl(facts: Facts) -> Finding:
    nccl = facts.package("torch").details.get("nccl")
    if not facts.torch_gpus:
        return Finding(part="NCCL", status="fallback", found="not used", used="gloo")
    if nccl is None:
        return Finding(
            part="NCCL",
            status="broken",
            found="not in this torch",
            remedy="install a torch that was built with NCCL; ranks on GPUs talk through it",
        )
    return Finding(part="NCCL", status="ok", found=nccl, used="between GPUs")


def check_megatron(facts: Facts) -> Finding:
    package = facts.package("megatron-core")
    if not package.works:
        remedy = _INSTALL
        if facts.package("apex").details.get("is_nvidia") is False:
            remedy = "pip uninstall apex: Megatron-Core imports it, and it is not NVIDIA's"
        return _needed("megatron-core", package, remedy)
    by_python = {_minor(row.python): row.megatron_core for row in tested_versions.TRAINERS}
    wanted = by_python.get(_minor(facts.python))
    if package.version in by_python.values():
        used = "tested" if package.version == wanted else "tested with another Python"
        return Finding(part="megatron-core", status="ok", found=str(package.version), used=used)
    return Finding(
        part="megatron-core",
        status="warning",
        found=str(package.version),
        used="not a tested version",
        remedy=f"pip install megatron-core=={wanted or tested_versions.TRAINERS[-1].megatron_core}",
    )


def check_transformers(facts: Facts) -> Finding:
    package = facts.package("transformers")
    if not package.works:
        return _needed("transformers", package, _INSTALL)
    tested = [row.transformers for row in tested_versions.TRAINERS]
    return Finding(
        part="transformers",
        status="ok",
        found=str(package.version),
        used=_tested(_minor(str(package.version)), tested),
    )


def check_transformer_engine(facts: Facts) -> Finding:
    package, name = facts.package("transformer-engine"), "Transformer Engine"
    if package.works:
        used = "layers, attention, fused Adam" if facts.torch_gpus else "nothing: no GPU"
        return Finding(part=name, status="ok", found=str(package.version), used=used)
    if facts.torch_gpus:
        remedy = "pip install --no-build-isolation 'transformer-engine[pytorch]', or use NVIDIA's "
        return _needed(name, package, remedy + "container: layers on GPUs are its layers")
    return _optional(name, package, used="Megatron's local layers, our attention for the CPU")


def check_fp8(facts: Facts) -> Finding:
    capability, part = facts.capability, "FP8"
    if capability is None:
        return Finding(
            part=part, status="fallback", found="no GPU", used="emulated: rounded numbers in fp32"
        )
    has_engine = facts.package("transformer-engine").works
    problems = {
        recipe: missing_support(recipe, capability, has_transformer_engine=has_engine)
        for recipe in LEAST_CAPABILITY
    }
    able = [recipe for recipe, problem in problems.items() if problem is None]
    if not able:
        return Finding(
            part=part,
            status="fallback",
            found="none of the recipes",
            used="bf16",
            remedy=str(next(iter(problems.values()))),
        )
    unable = [recipe for recipe in problems if recipe not in able]
    return Finding(
        part=part,
        status="ok",
        found=f"{', '.join(able)} (not {', '.join(unable)})" if unable else ", ".join(able),
        used="precision.trainer: " + ", ".join(f"fp8-{recipe}" for recipe in able),
    )


def check_apex(facts: Facts) -> Finding:
    package = facts.package("apex")
    engine = facts.package("transformer-engine").works
    instead = "Transformer Engine's fused Adam and norms" if engine else "torch's AdamW and norms"
    if package.details.get("is_nvidia") is False:
        return Finding(
            part="Apex",
            status="warning",
            found=f"PyPI's apex {package.version}, another program",
            used=instead,
            remedy="pip uninstall apex; NVIDIA's is built from github.com/NVIDIA/apex",
        )
    if not package.works:
        return _optional("Apex", package, used=instead)
    parts = [text for name, text in APEX_PARTS.items() if name in package.details["parts"]]
    if not parts:
        return Finding(
            part="Apex",
            status="warning",
            found=f"{package.version}, Python only",
            used=instead,
            remedy="build it with APEX_CPP_EXT=1 APEX_CUDA_EXT=1 (docs/install.md)",
        )
    return Finding(
        part="Apex",
        status="ok",
        found=f"{package.version or 'no version'}: {', '.join(parts)}",
        used="where Transformer Engine has no such part" if engine else "instead of torch's AdamW",
    )


def check_flash_attention(facts: Facts) -> Finding:
    package, part = facts.package("flash-attn"), "flash attention"
    has_engine = facts.torch_gpus > 0 and facts.package("transformer-engine").works
    if package.works and has_engine:
        return Finding(
            part=part,
            status="ok",
            found=str(package.version),
            used="where Transformer Engine prefers it to cuDNN's fused attention",
        )
    used = "cuDNN's fused attention, by Transformer Engine" if has_engine else "our attention"
    if package.works:
        return Finding(part=part, status="fallback", found=str(package.version), used=used)
    return _optional(part, package, used=used)


def check_sglang(facts: Facts) -> Finding:
    package, part = facts.sglang.get("sglang"), "SGLang"
    assert package is not None
    found = f"{package.version or 'no version'} in {facts.sglang_interpreter}"
    if package.works:
        if package.version in tested_versions.SGLANG:
            return Finding(part=part, status="ok", found=found, used="rollout.engine: sglang")
        return Finding(
            part=part,
            status="warning",
            found=found,
            used="refused, unless rollout.allow_untested_version=true",
            remedy=f"pip install sglang=={tested_versions.SGLANG[-1]} there",
        )
    remedy = (
        "make sglang (CPU) or an environment with "
        f"sglang=={tested_versions.SGLANG[-1]}; name it: --sglang-python PATH"
    )
    why = f": {package.problem}" if package.problem else ""
    return Finding(
        part=part,
        status="broken" if facts.is_sglang_wanted else "fallback",
        found=f"not in {facts.sglang_interpreter}{why}",
        used="rollout.engine: embedded",
        remedy=remedy,
    )


def check_router(facts: Facts) -> Finding:
    package, part = facts.sglang.get("sglang-router"), "sglang-router"
    assert package is not None
    if not package.works:
        return _optional(part, package, used="the client's own balancing")
    tested = package.version in tested_versions.SGLANG_ROUTER
    return Finding(
        part=part,
        status="ok" if tested else "warning",
        found=str(package.version),
        used="rollout.launch.router" if tested else "not a tested version",
        remedy=""
        if tested
        else f"pip install sglang-router=={tested_versions.SGLANG_ROUTER[-1]} there",
    )


def check_ray(facts: Facts) -> Finding:
    package = facts.package("ray")
    if not package.works:
        return _optional("ray", package, used="p3o train, torchrun or Slurm")
    return Finding(part="ray", status="ok", found=str(package.version), used="tools/ray_launch.py")


def check_profilers(facts: Facts) -> Finding:
    marks = "torch's NVTX ranges" if facts.torch_gpus else "no NVTX without CUDA"
    hooks = {"nvtx": "nvtx", "dlprof": "nvidia_dlprof_pytorch_nvtx"}
    found = [facts.nsys] if facts.nsys else []
    found += [text for name, text in hooks.items() if facts.package(name).works]
    broken = [text for name, text in hooks.items() if facts.package(name).problem]
    return Finding(
        part="profilers",
        status="warning" if broken else "ok" if facts.nsys else "fallback",
        found=", ".join([*found, *(f"{name} (cannot be imported)" for name in broken)])
        or "none: no nsys, no DLProf hook",
        used=marks if facts.nsys else "the step times in metrics.jsonl",
        remedy=f"pip uninstall {' '.join(broken)}, or mend it" if broken else "",
    )


def _needed(part: str, package: Package, remedy: str) -> Finding:
    return Finding(part=part, status="broken", found=_why_not(package), remedy=remedy)


def _optional(part: str, package: Package, *, used: str) -> Finding:
    """Absent is a choice, installed and broken is not."""
    return Finding(
        part=part,
        status="warning" if package.problem else "fallback",
        found=_why_not(package),
        used=used,
        remedy="mend or uninstall it: Megatron-Core tries to import it" if package.problem else "",
    )


def _why_not(package: Package) -> str:
    return f"cannot be imported: {package.problem}" if package.problem else "not installed"


def _tested(version: str | None, tested: list[str]) -> str:
    plain = str(version).partition("+")[0]
    is_tested = any(plain == one or plain.startswith(one + ".") for one in tested)
    return "tested" if is_tested else f"newer or older than what was tested: {', '.join(tested)}"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _numbers(version: str | None) -> tuple[int, ...]:
    """(2, 11) of 2.11.0a0+nv26.05."""
    return tuple(int(word) for word in str(version).split(".")[:2] if word.isdecimal())


def _dotted(capability: tuple[int, int] | None) -> str:
    return ".".join(map(str, capability or ()))
