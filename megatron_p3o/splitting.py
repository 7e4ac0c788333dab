"""Whether a model can be cut as a layout asks: every rule that needs both, without torch.

Messages name the field, the rule, and the nearest legal value.
"""

import math
from collections.abc import Callable, Mapping

from megatron_p3o.architecture import ModelArchitecture, MoeArchitecture
from megatron_p3o.config import LayoutSection
from megatron_p3o.errors import ConfigurationError


def check_layout(architecture: ModelArchitecture, layout: LayoutSection) -> None:
    """Check that the model can be cut as `layout` says.

    Raises:
        ConfigurationError: a size does not divide what it splits; the legal values are named.
    """
    moe = architecture.moe
    split = {
        name: getattr(architecture, name) for name in ("num_attention_heads", "num_key_value_heads")
    }
    if moe is None or len(moe.layers) < architecture.num_layers:
        split["ffn_hidden_size"] = architecture.ffn_hidden_size
    if moe is not None and moe.shared_ffn_hidden_size:
        split["shared experts' intermediate_size"] = moe.shared_ffn_hidden_size
    _check_divides("layout.tensor", layout.tensor, split)
    _check_stages(architecture.num_layers, layout)
    _check_experts(moe, layout)


def stage_layers(num_layers: int, layout: LayoutSection) -> list[int] | None:
    """Layers of each pipeline stage, or None where they cannot be shared as `layout` says.

    An embedding or loss that is accounted for counts as one layer of its stage.
    """
    num_layers += layout.account_for_embedding + layout.account_for_loss
    first, last = layout.first_stage_layers, layout.last_stage_layers
    middle = layout.pipeline - (first is not None) - (last is not None)
    rest = num_layers - (first or 0) - (last or 0)
    # No stage may be left without layers, nor layers without a stage.
    if middle < 0 or (middle == 0 and rest != 0):
        return None
    if middle > 0 and (rest < middle or rest % middle):
        return None
    ends = ([] if first is None else [first], [] if last is None else [last])
    return [*ends[0], *[rest // middle if middle else 0] * middle, *ends[1]]


def _check_stages(num_layers: int, layout: LayoutSection) -> None:
    sizes = stage_layers(num_layers, layout)
    if sizes is None:
        raise ConfigurationError(_explain_stages(num_layers, layout))
    virtual = layout.virtual_pipeline
    common = math.gcd(*sizes)
    if common % virtual:
        stages = ", ".join(map(str, sizes))
        raise ConfigurationError(
            f"layout.virtual_pipeline={virtual} must divide the layers of every pipeline stage "
            f"({stages}); {_nearest(virtual, common, lambda n: common % n == 0)}"
        )


def _explain_stages(num_layers: int, layout: LayoutSection) -> str:
    def legal(field: str) -> Callable[[int], bool]:
        return lambda n: stage_layers(num_layers, layout.model_copy(update={field: n})) is not None

    for field in ("first_stage_layers", "last_stage_layers"):
        size = getattr(layout, field)
        if size is not None and any(map(legal(field), range(1, num_layers))):
            return (
                f"layout.{field}={size} leaves layers that layout.pipeline={layout.pipeline} "
                f"stages cannot share evenly (the model's num_layers={num_layers}); "
                f"{_nearest(size, num_layers - 1, legal(field))}"
            )
    counted = [f for f in ("account_for_embedding", "account_for_loss") if getattr(layout, f)]
    total = num_layers + len(counted)
    also = f" + {len(counted)} for {' and '.join(counted)}" if counted else ""
    return (
        f"layout.pipeline={layout.pipeline} must divide the model's num_layers={num_layers}{also}; "
        f"{_nearest(layout.pipeline, total, legal('pipeline'))}"
    )


def _check_experts(moe: MoeArchitecture | None, layout: LayoutSection) -> None:
    if moe is None:
        for field in ("expert", "expert_tensor"):
            if getattr(layout, field) != 1:
                raise ConfigurationError(
                    f"layout.{field}={getattr(layout, field)} shares experts, but the model has "
                    "none; the nearest legal value is 1"
                )
        return
    _check_divides("layout.expert", layout.expert, {"num_experts": moe.num_experts})
    _check_divides(
        "layout.expert_tensor",
        layout.expert_tensor,
        {"moe_intermediate_size": moe.ffn_hidden_size},
    )
    if layout.tensor > 1 and not layout.sequence_parallel:
        raise ConfigurationError(
            f"layout.sequence_parallel=false must be true for a mixture-of-experts model with "
            f"layout.tensor={layout.tensor}: otherwise every tensor rank would route the same "
            "tokens; set it to true"
        )


def _check_divides(field: str, size: int, split: Mapping[str, int]) -> None:
    """`size` must divide every value of `split`."""
    common = math.gcd(*split.values())
    if common % size == 0:
        return
    rule = " and ".join(f"{name}={value}" for name, value in split.items() if value % size)
    raise ConfigurationError(
        f"{field}={size} must divide the model's {rule}; "
        f"{_nearest(size, common, lambda n: common % n == 0)}"
    )


def _nearest(size: int, greatest: int, is_legal: Callable[[int], bool]) -> str:
    legal = [value for value in range(1, greatest + 1) if is_legal(value)]
    if not legal:
        return "no value fits the layers fixed for the first and last stage; remove those fields"
    nearest = min(legal, key=lambda value: abs(value - size))
    return f"the nearest legal value is {nearest} (legal: {', '.join(map(str, legal))})"
