"""Whether FP8 fits the matrices of a model as a run cuts them, without torch."""

from collections.abc import Mapping

from megatron_p3o.architecture import ModelArchitecture
from megatron_p3o.config import RunConfig
from megatron_p3o.errors import ConfigurationError

# FP8 matrix products take multiples of it (transformer_engine, assert_dim_for_fp8_exec); of the
# microscaled ones, multiples of a block.
_KERNEL_MULTIPLE = 16
_BLOCKS: Mapping[str, int] = {"fp8-blockwise": 128, "fp8-mxfp8": 32}
_SERVED_BLOCK = 128


def check_fp8(architecture: ModelArchitecture, config: RunConfig) -> None:
    """Check an FP8 trainer, and an FP8 rollout on servers that are started by the run.

    Raises:
        ConfigurationError: a rank's share of a matrix is no multiple of what FP8 needs.
    """
    precision, layout = config.precision, config.layout
    sizes = {"tensor": layout.tensor, "expert_tensor": layout.expert_tensor}
    if precision.trainer_is_fp8:
        kernel = _BLOCKS["fp8-mxfp8"] if precision.trainer == "fp8-mxfp8" else _KERNEL_MULTIPLE
        where = f"precision.trainer={precision.trainer}"
        _check({"hidden_size": architecture.hidden_size}, 1, kernel, "model.path", where)
        for axis, dimensions in _sharded(architecture).items():
            size, field = sizes[axis], f"layout.{axis}={sizes[axis]}"
            _check(dimensions, size, kernel, field, where)
            if size > 1 and precision.trainer in _BLOCKS:
                # Blocks that cross shards would make results depend on the layout.
                _check(dimensions, size, _BLOCKS[precision.trainer], field, where)
    size = config.rollout.launch.tensor_parallel_size
    if config.rollout.engine == "sglang" and precision.rollout_is_fp8 and size > 1:
        for dimensions in _sharded(architecture).values():
            field = f"rollout.launch.tensor_parallel_size={size}"
            where = f"precision.rollout={precision.rollout}"
            _check(dimensions, size, _SERVED_BLOCK, field, where)


def _sharded(architecture: ModelArchitecture) -> dict[str, dict[str, int]]:
    """Dimensions that tensor ranks share, by the layout's axis."""
    heads, mla, moe = architecture.num_attention_heads, architecture.mla, architecture.moe
    if mla is not None:
        tensor = {
            "query heads' width": heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim),
            "key and value heads' width": heads * (mla.qk_nope_head_dim + mla.v_head_dim),
            "attention output width": heads * mla.v_head_dim,
        }
    else:
        width = architecture.head_dim
        tensor = {
            "query, key and value heads' width": width
            * (heads + 2 * architecture.num_key_value_heads),
            "attention output width": width * heads,
        }
    if moe is None or len(moe.layers) < architecture.num_layers:
        tensor["ffn_hidden_size"] = architecture.ffn_hidden_size
    if moe is None:
        return {"tensor": tensor}
    if moe.shared_ffn_hidden_size:
        tensor["shared experts' intermediate_size"] = moe.shared_ffn_hidden_size
    return {"tensor": tensor, "expert_tensor": {"moe_intermediate_size": moe.ffn_hidden_size}}


def _check(dimensions: Mapping[str, int], size: int, multiple: int, field: str, where: str) -> None:
    for name, dimension in dimensions.items():
        shard, rest = divmod(dimension, size)
        if rest or shard % multiple:
            whole = f"{name}={dimension}" if size == 1 else f"{name}={dimension} / {size}"
            raise ConfigurationError(
                f"{field}: {where} needs each rank's share of the model's {whole} to be a multiple "
                f"of {multiple}; choose a smaller size, or another precision"
            )
