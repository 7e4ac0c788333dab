"""Every difference between CUDA + NCCL and CPU + gloo, in one place.

Megatron-Core allocates on "cuda" by name, asks torch.cuda for devices, streams and random states,
and compares `tensor.type()` with CUDA type names. `stand_in_for_cuda` points those calls at the
CPU for the whole process. On a machine with CUDA nothing here is called except `device_type`.

What Transformer Engine brings on CUDA (fused norms, attention) is replaced by Megatron's local
spec with `RmsNorm` below and `cpu_attention.CpuAttention`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import megatron.core.tensor_parallel.mappings as mappings
import megatron.core.tensor_parallel.random as megatron_random
import megatron.core.transformer.moe.moe_utils as moe_utils
import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
import megatron.core.transformer.multi_latent_attention as latent_attention
import torch
import torch.distributed as dist
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_p3o.parallel.cpu_attention import CpuAttention

# Factories that Megatron-Core calls with a literal device="cuda" or pin_memory=True.
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like")


def device_type() -> str:
    """Name of the device type to train on: cuda where a GPU is visible, else cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"


class _NullStream:
    """Stands for a CUDA stream or event: work on the CPU is already ordered."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _nothing(self, *args: Any) -> None:
        pass

    wait_stream = wait_event = wait = record = synchronize = _nothing

    def query(self) -> bool:
        return True

    def record_event(self, *args: Any) -> "_NullStream":
        return self


def stand_in_for_cuda() -> None:
    """Let Megatron-Core's CUDA calls work on the CPU, process-wide. Idempotent.

    Must not be called where CUDA is available.
    """
    assert not torch.cuda.is_available()
    if getattr(torch.cuda.current_device, "is_cpu_stand_in", False):
        return
    _redirect_devices_and_streams()
    _redirect_random_states()
    _redirect_tensor_methods()
    _mend_moe()
    # Without Transformer Engine, Megatron-Core 0.16 has stand-ins here that are no classes.
    latent_attention.HAVE_TE = False
    mappings._gather_along_first_dim = _with_uneven_sizes(
        mappings._gather_along_first_dim, _gather_uneven
    )
    mappings._reduce_scatter_along_first_dim = _with_uneven_sizes(
        mappings._reduce_scatter_along_first_dim, _reduce_scatter_uneven
    )


def _redirect_devices_and_streams() -> None:
    cpu, stream = torch.device("cpu"), _NullStream()

    def current_device() -> torch.device:
        return cpu

    current_device.is_cpu_stand_in = True  # type: ignore[attr-defined]
    replacements = {
        "current_device": current_device,
        "synchronize": lambda *args, **kwargs: None,
        "empty_cache": lambda: None,
        "Stream": _NullStream,
        "Event": _NullStream,
        "current_stream": lambda *args: stream,
        "default_stream": lambda *args: stream,
        "stream": lambda stream: contextlib.nullcontext(),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapped


def _redirect_random_states() -> None:
    def get_state(*args: Any, **kwargs: Any) -> Tensor:
        return torch.get_rng_state()

    def set_state(state: Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    def manual_seed(seed: int) -> None:
        torch.random.default_generator.manual_seed(int(seed))

    for module in (torch.cuda, torch.cuda.random):
        setattr(module, "get_rng_state", get_state)  # noqa: B010 - mypy forbids plain assignment
        setattr(module, "set_rng_state", set_state)  # noqa: B010
    setattr(torch.cuda, "manual_seed", manual_seed)  # noqa: B010
    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state


def _redirect_tensor_methods() -> None:
    original_type = torch.Tensor.type

    def cuda_type_name(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        # The optimizer and gradient clipping accept only 'torch.cuda.FloatTensor' and the like.
        if args or kwargs:
            return original_type(self, *args, **kwargs)
        return original_type(self).replace("torch.", "torch.cuda.", 1)

    def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    methods: dict[str, Any] = {
        "type": cuda_type_name,
        "cuda": stay,
        "record_stream": lambda self, stream: None,
    }
    for name, method in methods.items():
        setattr(torch.Tensor, name, method)
    setattr(torch.nn.Module, "cuda", stay)  # noqa: B010


def _mend_moe() -> None:
    # Without Transformer Engine the router module leaves this name undefined and fails on use.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None

    def as_host_list(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # Megatron converts split sizes only as it copies them from the GPU.
        return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = as_host_list


def _with_uneven_sizes(
    even: Callable[..., Tensor],
    uneven: Callable[[Tensor, dist.ProcessGroup, Sequence[int]], Tensor],
) -> Callable[..., Tensor]:
    """gloo's collectives want equal sizes; shares of an expert's tokens are not equal."""

    def collective(
        tensor: Tensor,
        group: dist.ProcessGroup,
        sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> Tensor:
        if sizes is None or dist.get_world_size(group) == 1:
            return even(tensor, group, sizes, use_global_buffer)
        return uneven(tensor, group, [int(size) for size in sizes])

    return collective


def _gather_uneven(tensor: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> Tensor:
    parts = [tensor.new_empty(size, *tensor.shape[1:]) for size in sizes]
    parts[dist.get_rank(group)] = tensor.contiguous()
    for rank, part in enumerate(parts):
        if part.numel():
            dist.broadcast(part, src=dist.get_global_rank(group, rank), group=group)
    return torch.cat(parts)


def _reduce_scatter_uneven(
    tensor: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]
) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total.split(list(sizes))[dist.get_rank(group)].clone()


def transformer_config_overrides() -> dict[str, Any]:
    """TransformerConfig fields that turn off what only CUDA kernels provide."""
    return {
        "use_cpu_initialization": True,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }


class RmsNorm(torch.nn.RMSNorm):
    """torch's RMSNorm in the place of Megatron's wrapper of it, which refuses sequence parallelism.

    Under sequence parallelism each tensor rank sees a part of the sequence, so the weight's
    gradient is summed over them: the mark asks Megatron's finalize_model_grads for it.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, **unused: Any
    ) -> None:
        assert config.normalization == "RMSNorm"
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def adapt_layer_spec(spec: Any) -> None:
    """Put this package's attention and norm into a local spec, in place."""
    _replace_modules(spec, {DotProductAttention: CpuAttention, WrappedTorchNorm: RmsNorm}, set())


def _replace_modules(node: Any, replacements: Mapping[Any, Any], seen: set[int]) -> None:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, list):
        for item in node:
            _replace_modules(item, replacements, seen)
    elif dataclasses.is_dataclass(node):
        for field in dataclasses.fields(node):
            value = getattr(node, field.name)
            if isinstance(value, type) and value in replacements:
                setattr(node, field.name, replacements[value])
            else:
                _replace_modules(value, replacements, seen)
