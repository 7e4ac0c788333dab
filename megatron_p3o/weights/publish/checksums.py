"""What a server's weights must hash to, computed from the trainer's tensors while they are sent.

SGLang's `weights_checker` gives a checksum of every parameter of every tensor rank. Its parameters
are not Hugging Face tensors: query, key and value are fused, gate and up too, experts are stacked,
the vocabulary is padded to a multiple of 64, and each rank has its shard. So this knows how the
dense Llama, Qwen and Mistral models of a server are put together:

    *.q_proj, k_proj, v_proj  -> *.qkv_proj       rows of each; key and value repeat below one group
    *.gate_proj, up_proj      -> *.gate_up_proj   rows of each
    *.o_proj, down_proj       -> the same         columns
    embed_tokens, lm_head     -> the same         rows of the padded vocabulary
    norms                     -> the same         whole on every rank

A checksum is the first 8 bytes of the SHA-256 of a parameter's bytes, and FP8 weights are hashed as
weight x scale in bf16. That is how a server on the CPU does it; on a GPU it hashes differently.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_p3o.architecture import ModelArchitecture
from megatron_p3o.weights.publish.served import FP8
from megatron_p3o.weights.quantize import dequantize_blockwise
from megatron_p3o.weights.resharding.hf_source import SCALE_SUFFIX

_VOCAB_MULTIPLE = 64
_FUSED = {
    "q_proj": ("qkv_proj", 3),
    "k_proj": ("qkv_proj", 3),
    "v_proj": ("qkv_proj", 3),
    "gate_proj": ("gate_up_proj", 2),
    "up_proj": ("gate_up_proj", 2),
}
_COLUMNS = ("o_proj", "down_proj")
_VOCABULARY = ("embed_tokens", "lm_head")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChecksumReport:
    """What a comparison found, as names of server parameters."""

    num_equal: int
    different: tuple[str, ...]
    """Parameters whose checksum is another one."""
    absent: tuple[str, ...]
    """Parameters that the server should have and does not report."""

    @property
    def is_proof(self) -> bool:
        return self.num_equal > 0 and not self.different and not self.absent


class ServerChecksums:
    """Expected checksums of one model on servers of one tensor-parallel size.

    Example:
        expected = ServerChecksums(architecture, tensor_size=2)
        for name, tensor in served_tensors(...):
            expected.add(name, tensor)
        report = expected.compare([{"model.norm.weight": "9f2c...", ...}, {...}])
    """

    def __init__(self, architecture: ModelArchitecture, tensor_size: int) -> None:
        """
        Args:
            architecture: of the model.
            tensor_size: tensor ranks of a server.
        """
        assert self.can_predict(architecture), architecture.family
        self._num_kv_heads = architecture.num_key_value_heads
        self._size = tensor_size
        self._hashes: dict[tuple[int, str], hashlib._Hash] = {}
        self._parts_left: dict[str, int] = {}
        self._unscaled: tuple[str, Tensor] | None = None

    @staticmethod
    def can_predict(architecture: ModelArchitecture) -> bool:
        """Whether this describes how a server puts the model together: not with experts or latent
        attention."""
        return architecture.moe is None and architecture.mla is None

    def add(self, name: str, tensor: Tensor) -> None:
        """The next tensor of the model as it is sent: query, key, value in this order, gate before
        up, scales after their FP8 weight."""
        if tensor.dtype is FP8:
            self._unscaled = (name, tensor)
            return
        if name.endswith(SCALE_SUFFIX):
            assert self._unscaled is not None, name
            weight_name, quantized = self._unscaled
            assert name == weight_name + SCALE_SUFFIX, (name, weight_name)
            self._unscaled = None
            name, tensor = (
                weight_name,
                dequantize_blockwise(quantized, tensor, dtype=torch.bfloat16),
            )
        module, _, kind = name.rpartition(".")
        prefix, _, leaf = module.rpartition(".")
        fused, num_parts = _FUSED.get(leaf, (leaf, 1))
        parameter = ".".join(filter(None, (prefix, fused, kind)))
        self._parts_left[parameter] = self._parts_left.get(parameter, num_parts) - 1
        for rank in range(self._size):
            self._hash(rank, parameter).update(_bytes(self._shard(leaf, tensor, rank)))

    def compare(self, reported: Sequence[Mapping[str, str]]) -> ChecksumReport:
        """Against the checksums of each tensor rank, by the names of server parameters."""
        assert not any(self._parts_left.values()), self._parts_left
        different, absent, num_equal = [], [], 0
        for (rank, parameter), digest in self._hashes.items():
            found = reported[rank].get(parameter) if rank < len(reported) else None
            name = parameter if self._size == 1 else f"{parameter} of tensor rank {rank}"
            if found is None:
                absent.append(name)
            elif found == digest.hexdigest()[:16]:
                num_equal += 1
            else:
                different.append(name)
        return ChecksumReport(num_equal=num_equal, different=tuple(different), absent=tuple(absent))

    def _hash(self, rank: int, parameter: str) -> "hashlib._Hash":
        return self._hashes.setdefault((rank, parameter), hashlib.sha256())

    def _shard(self, leaf: str, tensor: Tensor, rank: int) -> Tensor:
        if leaf in _VOCABULARY:
            rows = -(-len(tensor) // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE // self._size
            shard = tensor[rank * rows : (rank + 1) * rows]
            return torch.nn.functional.pad(shard, (0, 0, 0, rows - len(shard)))
        if leaf in ("k_proj", "v_proj") and self._num_kv_heads < self._size:
            head = rank * self._num_kv_heads // self._size
            return tensor.chunk(self._num_kv_heads)[head]
        if leaf in _FUSED:
            return tensor.chunk(self._size)[rank]
        if leaf in _COLUMNS and tensor.dim() == 2:
            return tensor.chunk(self._size, dim=1)[rank]
        return tensor


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    array: Any = flat.numpy()
    return memoryview(array)
