"""Weights between Hugging Face checkpoints and Megatron parameters under any tensor layout."""

from megatron_p3o.weights.families import ParamRow, param_rows, rows_by_megatron_name
from megatron_p3o.weights.hf_io import HfReader, save_hf
from megatron_p3o.weights.load import TensorShard, hf_tensors, load_hf_weights

__all__ = [
    "HfReader",
    "ParamRow",
    "TensorShard",
    "hf_tensors",
    "load_hf_weights",
    "param_rows",
    "rows_by_megatron_name",
    "save_hf",
]
