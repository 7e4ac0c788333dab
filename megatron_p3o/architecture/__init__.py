"""What a Hugging Face model directory says about its model, read without torch."""

from megatron_p3o.architecture.model import (
    Family,
    MlaArchitecture,
    ModelArchitecture,
    MoeArchitecture,
    padded_vocab_size,
)
from megatron_p3o.architecture.read import read_architecture

__all__ = [
    "Family",
    "MlaArchitecture",
    "ModelArchitecture",
    "MoeArchitecture",
    "padded_vocab_size",
    "read_architecture",
]
