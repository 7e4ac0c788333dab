"""Which GPUs compute by which FP8 recipe. Imports neither torch nor Megatron."""

from collections.abc import Mapping
from types import MappingProxyType

LEAST_CAPABILITY: Mapping[str, tuple[tuple[int, int], str]] = MappingProxyType(
    {
        "delayed": ((8, 9), "Ada or Hopper"),
        "tensorwise": ((8, 9), "Ada or Hopper"),
        "blockwise": ((9, 0), "Hopper"),
        "mxfp8": ((10, 0), "Blackwell"),
    }
)
"""Recipe, by Megatron's name -> least CUDA compute capability and its family."""


def missing_support(
    recipe: str, capability: tuple[int, int], *, has_transformer_engine: bool
) -> str | None:
    """Why a GPU cannot compute by a recipe, with the remedy; None when it can.

    Args:
        recipe: Megatron's name of it.
        capability: CUDA compute capability.
        has_transformer_engine: whether it is installed.
    """
    if not has_transformer_engine:
        return "needs Transformer Engine; install transformer-engine[pytorch], or choose bf16"
    least, family = LEAST_CAPABILITY[recipe]
    if capability >= least:
        return None
    able = [name for name, (needed, _) in LEAST_CAPABILITY.items() if capability >= needed]
    remedy = f"choose {' or '.join(f'fp8-{name}' for name in able)}" if able else "choose bf16"
    return (
        f"needs a GPU of compute capability {least[0]}.{least[1]} ({family}) or later; this one "
        f"has {capability[0]}.{capability[1]}: {remedy}"
    )
