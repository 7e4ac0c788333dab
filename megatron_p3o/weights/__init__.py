"""Weights between Hugging Face checkpoints and Megatron parameters under any tensor layout."""

from megatron_p3o.weights.families import ParamRow, param_rows, rows_by_megatron_name
from megatron_p3o.weights.hf_io import HfReader, save_hf
from megatron_p3o.weights.load import TensorShard, hf_tensors, load_hf_weights
from megatron_p3o.weights.quantize import dequantize_blockwise, quantize_blockwise
from megatron_p3o.weights.resharding.options import ReshardOptions
from megatron_p3o.weights.resharding.run import ReshardReport, reshard
from megatron_p3o.weights.resharding.target import TargetLayout

__all__ = [
    "HfReader",
    "ParamRow",
    "ReshardOptions",
    "ReshardReport",
    "TargetLayout",
    "TensorShard",
    "dequantize_blockwise",
    "hf_tensors",
    "load_hf_weights",
    "param_rows",
    "quantize_blockwise",
    "reshard",
    "rows_by_megatron_name",
    "save_hf",
]
