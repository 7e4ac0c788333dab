"""Stands in for SGLang's CUDA kernels, which it imports by name and never calls on a CPU."""

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*arguments: Any, **keywords: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs a CUDA build; this is a CPU server")

    kernel.__name__ = name
    return kernel
