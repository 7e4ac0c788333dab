"""Low-precision numbers on any device: formats, scales, and rounding tensors to them.

Pure torch. Used by the trainer's emulation of FP8 recipes, by the embedded rollout engine and by
weight quantisation, so that all of them mean the same by a block or a scale.
"""

from megatron_p3o.numerics.blocks import num_blocks, to_blocks
from megatron_p3o.numerics.formats import E2M1, E4M3, E5M2, FORMATS, FloatFormat, round_to_format
from megatron_p3o.numerics.scaling import Scaling, fake_quantize

__all__ = [
    "E2M1",
    "E4M3",
    "E5M2",
    "FORMATS",
    "FloatFormat",
    "Scaling",
    "fake_quantize",
    "num_blocks",
    "round_to_format",
    "to_blocks",
]
