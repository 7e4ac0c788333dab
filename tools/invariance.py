"""Print docs/invariance.md: how far the update of every layout is from one rank's.

python -m tools.invariance > docs/invariance.md

From the root of the repository, with the development dependencies; ranks are gloo processes on the
CPU.
"""

import sys
import tempfile
from pathlib import Path

from tests.dist.matrix import CASES, Case, Errors, measure, world_size

_AXES = {
    "tensor": "TP",
    "pipeline": "PP",
    "virtual_pipeline": "VPP",
    "context": "CP",
    "expert": "EP",
    "expert_tensor": "ETP",
    "data": "DP",
}

_TITLES = {
    "dense, untied": "Dense model (Qwen3), untied embeddings",
    "dense, tied": "Dense model (Llama), tied embeddings",
    "experts, untied": "Mixture of experts (Qwen3-MoE, first layer dense), untied embeddings",
    "experts, tied": "Mixture of experts (Qwen3-MoE), tied embeddings",
    "experts, replayed": "Mixture of experts (Qwen3-MoE), tokens sent to recorded experts",
    "mixtral": "Mixtral",
    "glm4": "GLM-4: norms behind attention and MLP, RoPE on half of the channels",
    "glm4_moe": "GLM-4.5: sigmoid router, shared expert, first layer dense",
    "deepseek_v2": "DeepSeek-V2: latent attention, shared experts, first layer dense",
    "deepseek_v3": "DeepSeek-V3: as V2, with a rank of the queries, groups of experts, yarn",
}

_INTRODUCTION = """\
# One batch, one answer

Rendered by `python -m tools.invariance > docs/invariance.md`.

A recorded batch of ragged, off-policy samples (ESS about 0.8) is trained on for three steps by
every layout below, on gloo ranks in fp32. The columns give the largest relative difference to one
rank with one padded microbatch: of the losses, of the trust and router statistics, of every
gradient tensor of the first step, and of every weight tensor after three steps, each relative to
the tensor's largest entry, over all ranks. `tests/dist/test_matrix.py` bounds all of them by 1e-5.

TP tensor, SP sequence, PP pipeline, VPP virtual pipeline, CP context, EP expert, ETP expert tensor,
DP data parallel. "dist. opt." is Megatron's distributed optimizer: each rank then holds only a part
of the reduced gradients, and the weights speak for them.
"""

_HEADER = """\
| Ranks | Layout | Microbatches | Optimizer | Loss | Trust | Gradients | Weights |
|---|---|---|---|---|---|---|---|
"""


def describe_layout(case: Case) -> str:
    words = []
    for name, value in case.layout.items():
        if name in _AXES:
            words.append(f"{_AXES[name]}{value}")
        elif name == "sequence_parallel":
            words.append("SP")
        elif name == "first_stage_layers":
            words.append(f"first stage {value} of 4 layers")
        else:
            words.append(name.replace("account_for_", "counting "))
    return " ".join(words) or "one rank"


def describe_microbatches(case: Case) -> str:
    train = case.train
    if train.get("packing"):
        words = [f"packed, {train['max_tokens_per_microbatch']} tokens"]
    else:
        words = [f"padded, {train['microbatch_size']}"]
    if "recompute" in train:
        words.append(f"{train['recompute']} recomputation")
    if "scoring" in train:
        words.append(f"{train['scoring']} scoring")
    return ", ".join(words)


def row(case: Case, errors: Errors) -> str:
    values = (errors.loss, errors.trust, errors.gradients, errors.weights)
    numbers = " | ".join("-" if value is None else f"{value:.0e}" for value in values)
    optimizer = "dist. opt." if case.sharded else "whole"
    return (
        f"| {world_size(case)} | {describe_layout(case)} | {describe_microbatches(case)} "
        f"| {optimizer} | {numbers} |"
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        errors = measure(CASES, Path(name))
    print(_INTRODUCTION)
    for model in dict.fromkeys(case.model for case in CASES):
        rows = [row(c, e) for c, e in zip(CASES, errors, strict=True) if c.model == model]
        print(f"## {_TITLES[model]}\n")
        print(_HEADER + "\n".join(rows) + "\n")
    print(f"{len(CASES)} cases, largest difference {max(e.worst() for e in errors):.1e}.")
    print(f"worst {max(e.worst() for e in errors):.1e}", file=sys.stderr)


if __name__ == "__main__":
    main()
