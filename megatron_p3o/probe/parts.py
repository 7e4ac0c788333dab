"""The parts of a model that an ablation rounds alone, or leaves exact alone.

A part is a set of weights, a set of weights whose inputs are rounded, and a set of layers whose
keys and values are. Which projection a weight belongs to is read from the weight tables, so every
family has the same parts; the experts of a layer belong to its projections.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_p3o.config import PrecisionSection
from megatron_p3o.rollout import ServedNumerics
from megatron_p3o.weights import ParamRow

_PROJECTIONS = ("q, k and v", "o", "gate and up", "down")
Kind = Literal["full", "parts", "complement", "layers"]


@dataclass(frozen=True, slots=True)
class RoundedParts:
    """What is rounded as a server would; everything else is exact.

    Example:
        RoundedParts(weights=frozenset({"model.layers.0.mlp.up_proj.weight"}))
    """

    weights: frozenset[str] = frozenset()
    """By checkpoint name."""
    inputs: frozenset[str] = frozenset()
    """Weights, by checkpoint name, whose linear layer rounds its input."""
    kv_layers: frozenset[int] = frozenset()

    def without(self, other: "RoundedParts") -> "RoundedParts":
        return RoundedParts(
            self.weights - other.weights,
            self.inputs - other.inputs,
            self.kv_layers - other.kv_layers,
        )


NOTHING = RoundedParts()


@dataclass(frozen=True, slots=True)
class Ablation:
    """A row of the ablation's tables."""

    name: str
    kind: Kind
    """`parts`: the part alone is rounded; `complement`: all but it is; `layers`: one layer is."""
    parts: RoundedParts


@dataclass(frozen=True, slots=True)
class _Weight:
    name: str
    layer: int
    projection: str


def ablations(
    rows: Sequence[ParamRow], precision: PrecisionSection, kinds: Sequence[str]
) -> tuple[Ablation, ...]:
    """The rows of the tables, `full` first. Parts that round nothing, or what another rounds, are
    left out.

    Args:
        rows: of the model.
        precision: with an FP8 rollout; what `full` rounds.
        kinds: any of `parts` and `layers`.
    """
    weights = [_weight(row, name) for row in rows if row.fp8 for name in row.hf]
    layers = sorted({weight.layer for weight in weights})
    full = _rounded(weights, precision)
    found = [Ablation("everything", "full", full)]
    if "parts" in kinds:
        named = [*_named_parts(weights, layers, precision)]
        seen = {NOTHING, full}
        for name, part in named:
            if part not in seen:
                found.append(Ablation(name, "parts", part))
            seen.add(part)
        for name, part in named:
            if (rest := full.without(part)) not in seen:
                found.append(Ablation(f"all but {name}", "complement", rest))
            seen.add(rest)
    if "layers" in kinds:
        for layer in layers:
            mine = [weight for weight in weights if weight.layer == layer]
            found.append(Ablation(f"layer {layer}", "layers", _rounded(mine, precision)))
    return tuple(found)


def ablation_numerics(precision: PrecisionSection) -> ServedNumerics:
    """The numerics of all rows. They round a KV cache too, in the layers that a row names."""
    if precision.rollout_kv_cache == "auto":
        precision = precision.model_copy(update={"rollout_kv_cache": "fp8_e4m3"})
    return ServedNumerics.of(precision)


def _named_parts(
    weights: Sequence[_Weight], layers: Sequence[int], precision: PrecisionSection
) -> Iterator[tuple[str, RoundedParts]]:
    for projection in _PROJECTIONS:
        mine = [weight for weight in weights if weight.projection == projection]
        names = frozenset(weight.name for weight in mine)
        # The KV cache has a row of its own.
        inputs = names if precision.rollout_activations == "quantized" else frozenset()
        yield projection, RoundedParts(names, inputs)
    full = _rounded(weights, precision)
    yield "weights", RoundedParts(weights=full.weights)
    yield "activations", RoundedParts(inputs=full.inputs)
    kv_layers = frozenset(layers)
    name = "KV cache" if full.kv_layers else "KV cache in e4m3 (not in everything)"
    yield name, RoundedParts(kv_layers=kv_layers)
    for name, layer in (("first layer", layers[0]), ("last layer", layers[-1])):
        yield name, _rounded([weight for weight in weights if weight.layer == layer], precision)


def _rounded(weights: Sequence[_Weight], precision: PrecisionSection) -> RoundedParts:
    """These weights with all that a server of this precision rounds around them."""
    names = frozenset(weight.name for weight in weights)
    has_kv = precision.rollout_kv_cache != "auto"
    return RoundedParts(
        weights=names,
        inputs=names if precision.rollout_activations == "quantized" else frozenset(),
        kv_layers=frozenset(weight.layer for weight in weights) if has_kv else frozenset(),
    )


def _weight(row: ParamRow, name: str) -> _Weight:
    """By the row's Megatron name, such as decoder.layers.3.mlp.linear_fc1.weight."""
    parts = row.megatron.split(".")
    kinds = {"linear_proj": "o", "linear_fc1": "gate and up", "linear_fc2": "down"}
    # The rest are linear_qkv and the projections of latent attention.
    return _Weight(name, layer=int(parts[2]), projection=kinds.get(parts[-2], "q, k and v"))
