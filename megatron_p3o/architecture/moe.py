"""Reads what a config.json says of a mixture of experts."""

from megatron_p3o.architecture.fields import Fields
from megatron_p3o.architecture.model import Family, MoeArchitecture


def read_moe(config: Fields, family: Family, num_layers: int) -> MoeArchitecture | None:
    """None for a dense model.

    Raises:
        InputError: a field is missing or impossible, or Megatron's router computes otherwise.
    """
    match family:
        case "qwen3_moe":
            moe = _qwen3(config, num_layers)
        case "mixtral":
            moe = MoeArchitecture(
                num_experts=config.positive_int("num_local_experts"),
                experts_per_token=config.positive_int("num_experts_per_tok"),
                ffn_hidden_size=config.positive_int("intermediate_size"),
                normalize_topk=True,
                layers=tuple(range(num_layers)),
            )
        case "deepseek_v2" | "deepseek_v3" | "glm4_moe":
            moe = _with_shared_experts(config, family, num_layers)
        case _:
            return None
    if moe is not None:
        _check(config, moe)
    return moe


def _check(config: Fields, moe: MoeArchitecture) -> None:
    per_token = moe.experts_per_token
    if per_token > moe.num_experts:
        raise config.error(
            f"num_experts_per_tok={per_token} must be <= num_experts={moe.num_experts}; mend it"
        )
    if per_token == 1 and moe.normalize_topk and moe.score_function == "softmax":
        raise config.error(
            "norm_topk_prob=true with num_experts_per_tok=1 makes every router weight 1, so that "
            "the router cannot learn, and Megatron refuses it; use a model with norm_topk_prob="
            "false or several experts per token"
        )
    if moe.score_function == "sigmoid" and not (moe.normalize_topk and per_token > 1):
        raise config.error(
            f"norm_topk_prob={str(moe.normalize_topk).lower()} with num_experts_per_tok="
            f"{per_token} is not supported, Megatron scales the weights of several sigmoid-scored "
            "experts to sum to 1; use a model with norm_topk_prob=true"
        )
    if moe.num_experts % moe.num_groups or moe.groups_per_token > moe.num_groups:
        raise config.error(
            f"n_group={moe.num_groups} must divide n_routed_experts={moe.num_experts} and be >= "
            f"topk_group={moe.groups_per_token}; mend them"
        )
    if moe.num_groups > 1 and per_token != 2 * moe.groups_per_token:
        raise config.error(
            f"topk_group={moe.groups_per_token} with num_experts_per_tok={per_token} is not "
            "supported: a group's score is the sum of its 2 best experts in transformers, and of "
            "num_experts_per_tok / topk_group in Megatron; use a model where that is 2"
        )


def _qwen3(config: Fields, num_layers: int) -> MoeArchitecture | None:
    """None where every layer is dense, as `Qwen3MoeDecoderLayer` of transformers decides."""
    # transformers writes either name.
    counts = {config.get(name) for name in ("num_experts", "num_local_experts")} - {None}
    if len(counts) != 1 or not isinstance(num_experts := counts.pop(), int) or num_experts < 1:
        raise config.error("num_experts must be given once, as a positive integer; mend it")
    step = config.positive_int("decoder_sparse_step", default=1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise config.error(f"mlp_only_layers={dense!r} must be a list of layer indices; mend it")
    layers = tuple(
        layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0
    )
    moe = MoeArchitecture(
        num_experts=num_experts,
        experts_per_token=config.positive_int("num_experts_per_tok"),
        ffn_hidden_size=config.positive_int("moe_intermediate_size"),
        normalize_topk=config.flag("norm_topk_prob"),
        layers=layers,
    )
    _check(config, moe)
    return moe if layers else None


def _with_shared_experts(config: Fields, family: Family, num_layers: int) -> MoeArchitecture | None:
    """DeepSeek-V2 and V3 and GLM-4.5: dense layers first, an expert that takes every token."""
    ffn_hidden_size = config.positive_int("moe_intermediate_size")
    first = config.count("first_k_dense_replace")
    is_sigmoid = family != "deepseek_v2"
    if family == "deepseek_v2":
        config.only("topk_method", "greedy")
        config.only("norm_topk_prob", False)
    layers = tuple(range(first, num_layers))
    moe = MoeArchitecture(
        num_experts=config.positive_int("n_routed_experts"),
        experts_per_token=config.positive_int("num_experts_per_tok"),
        ffn_hidden_size=ffn_hidden_size,
        normalize_topk=is_sigmoid and config.flag("norm_topk_prob"),
        layers=layers,
        shared_ffn_hidden_size=config.positive_int("n_shared_experts") * ffn_hidden_size,
        has_expert_bias=is_sigmoid,
        score_function="sigmoid" if is_sigmoid else "softmax",
        scaling_factor=config.positive_float("routed_scaling_factor", default=1.0),
        num_groups=config.positive_int("n_group", default=1) if is_sigmoid else 1,
        groups_per_token=config.positive_int("topk_group", default=1) if is_sigmoid else 1,
    )
    return moe if layers else None
