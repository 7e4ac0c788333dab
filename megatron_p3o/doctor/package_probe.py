"""Import one package and print what it is, as JSON behind a mark.

`system` runs this text with `python -c`, also in interpreters without megatron_p3o (SGLang's), so
it needs the standard library alone. Whatever goes wrong is left to end this process: its last words
are the finding.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import pathlib
import sys
from typing import Any

MARK = "P3O_PACKAGE "
# Name -> distributions that may hold it, and the modules that must be importable.
PACKAGES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "torch": (("torch",), ("torch",)),
    "megatron-core": (
        ("megatron-core",),
        ("megatron.core", "megatron.core.models.gpt", "megatron.core.optimizer"),
    ),
    "transformer-engine": (
        ("transformer-engine", "transformer_engine"),
        ("transformer_engine", "transformer_engine.pytorch"),
    ),
    "apex": (("apex",), ("apex",)),
    "flash-attn": (("flash-attn", "flash_attn"), ("flash_attn",)),
    "transformers": (("transformers",), ("transformers",)),
    "ray": (("ray",), ("ray",)),
    "nvtx": (("nvtx",), ("nvtx",)),
    "dlprof": (("nvidia-dlprof-pytorch-nvtx",), ("nvidia_dlprof_pytorch_nvtx",)),
    "sglang": (("sglang",), ("sglang",)),
    "sglang-router": (("sglang-router",), ("sglang_router",)),
}
# Extension modules of NVIDIA's Apex and what Megatron-Core takes them for.
APEX_PARTS = {
    "amp_C": "fused Adam and gradient clipping",
    "fused_layer_norm_cuda": "fused layer norm",
    "fast_layer_norm": "persistent layer norm",
    "fused_weight_gradient_mlp_cuda": "fused gradient accumulation",
}


def describe(name: str) -> dict[str, Any]:
    distributions, modules = PACKAGES[name]
    if not has_module(modules[0].partition(".")[0]) or not has_module(modules[0]):
        return {"is_installed": False}
    if name == "apex" and not is_nvidias_apex():
        # PyPI's apex is another program; importing it may run anything.
        return {"version": version(distributions), "details": {"is_nvidia": False}}
    for module in modules:
        importlib.import_module(module)
    details: dict[str, Any] = {}
    if name == "torch":
        details = describe_torch()
    elif name == "apex":
        parts = [part for part in APEX_PARTS if has_module(part)]
        details = {"is_nvidia": True, "parts": parts}
    elif name == "sglang":
        details = {"torch": version(("torch",))}
    return {"version": version(distributions), "details": details}


def describe_torch() -> dict[str, Any]:
    torch = importlib.import_module("torch")
    found = torch.cuda.is_available()
    return {
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if found else None,
        "has_gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        "capabilities": [
            torch.cuda.get_device_capability(n) for n in range(torch.cuda.device_count())
        ]
        if found
        else [],
    }


def is_nvidias_apex() -> bool:
    """Told by a file of it: to look for a module in a package would import the package."""
    spec = importlib.util.find_spec("apex")
    places = spec.submodule_search_locations if spec else None
    return any((pathlib.Path(place) / "multi_tensor_apply").is_dir() for place in places or ())


def has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):
        return False


def version(distributions: tuple[str, ...]) -> str | None:
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


if __name__ == "__main__":
    print(MARK + json.dumps(describe(sys.argv[1])), flush=True)
