"""The invariance matrix: layouts by world size, and how far each one's update is from one rank's.

A case is trained on a recorded batch of ragged, off-policy samples. Its loss, trust statistics,
every gradient of the first step and the weights after three steps are compared with those of one
rank and one padded microbatch. `tests/dist/test_matrix.py` bounds the errors, and
`python -m tools.invariance` prints them.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_p3o.architecture import read_architecture
from megatron_p3o.config import RunConfig
from megatron_p3o.parallel.checkpoint import CheckpointStore
from megatron_p3o.parallel.gather import ShardGatherer
from megatron_p3o.parallel.layout import ParallelLayout
from megatron_p3o.parallel.setup import ParallelContext, initialize, shut_down
from megatron_p3o.rollout import ReplayRollouts
from megatron_p3o.run_dir import RunDir
from megatron_p3o.trainer.display import SilentDisplay
from megatron_p3o.trainer.experience import RecordedRollouts, score_groups
from megatron_p3o.trainer.loop import Observers, train
from megatron_p3o.trainer.policy import Policy
from megatron_p3o.weights import hf_tensors, rows_by_megatron_name
from tests.dist.harness import next_rendezvous, spawn
from tests.dist.models import make_model, make_recording, replay_config

STEPS, GROUPS, GROUP_SIZE = 3, 4, 4

MODELS: Mapping[str, Mapping[str, Any]] = {
    "dense, untied": {"family": "qwen3", "tied": False},
    "dense, tied": {"family": "llama", "tied": True},
    # The first of its four layers is dense, so that layers differ.
    "experts, untied": {"family": "qwen3_moe", "tied": False, "mlp_only_layers": [0]},
    "experts, tied": {"family": "qwen3_moe", "tied": True},
    "experts, replayed": {"family": "qwen3_moe", "tied": False, "mlp_only_layers": [0]},
    "mixtral": {"family": "mixtral", "tied": False},
    "glm4": {"family": "glm4", "tied": False},
    "glm4_moe": {"family": "glm4_moe", "tied": False},
    "deepseek_v2": {"family": "deepseek_v2", "tied": False},
    "deepseek_v3": {"family": "deepseek_v3", "tied": False},
}
REPLAYED = {"experts, replayed": (3, 2, 4)}
"""Models whose tokens go to recorded experts: (layers that route, experts per token, experts)."""

LOSS = ("loss/total", "loss/score", "loss/kl")
TRUST = (
    *("ess/step", "ess/drift", "ess/mismatch", "ratio/mean", "ratio/std", "ratio/max"),
    *("mismatch/k3", "entropy/mean", "p3o/cap_fraction"),
)
ROUTER = (
    *("router/load_max_over_mean", "router/load_max_over_mean_worst", "router/balance_loss"),
    "router/entropy_mean",
    "router/replay_disagreement",
)


Options = Mapping[str, int | bool | str]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to cut the work."""

    model: str
    """A key of MODELS."""
    layout: Options
    train: Options
    sharded: bool
    """Whether the optimizer is Megatron's distributed one; each rank then holds a part of the
    reduced gradients only, and the weights speak for them."""


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Largest relative differences to one rank, over ranks, steps and tensors.

    Of a metric |a - b| / |b|, of a tensor max |a - b| / max |b|.
    """

    loss: float
    trust: float
    gradients: float | None
    weights: float

    def worst(self) -> float:
        return max(self.loss, self.trust, self.gradients or 0.0, self.weights)


class Kept:
    """A sink that keeps the numbers it is given."""

    def __init__(self) -> None:
        self.steps: list[Mapping[str, float]] = []

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        self.steps.append({k: v for k, v in metrics.items() if not isinstance(v, str)})

    def close(self) -> None:
        pass


Outcome = tuple[dict[str, Tensor], list[Mapping[str, float]], dict[str, Tensor]]


WHOLE: Options = {"microbatch_size": 16}
ONES: Options = {"microbatch_size": 1}  # some context ranks then hold no response token
TWOS: Options = {"microbatch_size": 2}
THREES: Options = {"microbatch_size": 3}
# The interleaved schedule fills three microbatches up to four.
FOUR_MICROBATCHES: Options = {"microbatch_size": 5}
THREE_MICROBATCHES: Options = {"microbatch_size": 6, "recompute": "full"}
PACKED: Options = {"packing": True, "max_tokens_per_microbatch": 48}
FUSED: Options = {**PACKED, "scoring": "fused"}
RECOMPUTED: Options = {**PACKED, "recompute": "full"}
SELECTIVE: Options = {**THREES, "recompute": "selective"}

_SP: Options = {"tensor": 2, "sequence_parallel": True}
_VPP: Options = {"pipeline": 2, "virtual_pipeline": 2}
_BALANCED: Options = {
    "pipeline": 2,
    "account_for_embedding": True,
    "account_for_loss": True,
}
_SHORT_START: Options = {"pipeline": 2, "first_stage_layers": 1}
_LONG_START: Options = {"pipeline": 2, "first_stage_layers": 3}

# Of each model: layout, how microbatches are made, whether the optimizer is sharded.
_CUTS: Mapping[str, Sequence[tuple[Options, Options, bool]]] = {
    "dense, untied": [
        ({}, WHOLE, False),
        ({}, ONES, False),
        ({}, PACKED, False),
        ({"tensor": 2}, TWOS, False),
        (_SP, THREES, False),
        (_SP, PACKED, True),
        ({"context": 2}, THREES, False),
        ({"context": 2}, FUSED, False),
        ({"pipeline": 2}, RECOMPUTED, False),
        (_VPP, FOUR_MICROBATCHES, False),
        (_VPP, THREE_MICROBATCHES, True),
        (_SHORT_START, THREES, False),
        (_BALANCED, PACKED, False),
        ({"data": 2}, ONES, False),
        ({"data": 2}, SELECTIVE, True),
        ({"tensor": 2, "pipeline": 2}, THREES, False),
        ({"tensor": 2, "data": 2}, PACKED, True),
        ({"pipeline": 2, "data": 2}, ONES, True),
        ({"data": 4}, WHOLE, True),
        ({**_SP, "context": 2}, THREES, True),
        ({**_SP, "context": 2}, RECOMPUTED, False),
        ({**_SP, "pipeline": 2}, PACKED, False),
        ({"context": 2, "pipeline": 2}, PACKED, True),
        ({"context": 2, "data": 2}, PACKED, True),
        ({"context": 4}, ONES, False),
        ({"pipeline": 4}, TWOS, False),
        ({**_SP, "context": 2, "pipeline": 2}, PACKED, False),
        ({**_SP, **_VPP, "data": 2}, THREES, True),
    ],
    "dense, tied": [
        ({}, WHOLE, False),
        (_SP, PACKED, False),
        ({"context": 2}, THREES, False),
        ({"pipeline": 2}, TWOS, False),
        (_VPP, THREES, True),
        ({"context": 2, "pipeline": 2}, PACKED, False),
        ({"pipeline": 2, "data": 2}, ONES, True),
    ],
    "experts, untied": [
        ({}, WHOLE, False),
        ({}, PACKED, False),
        ({"data": 2, "expert": 2}, THREES, False),
        ({"data": 2, "expert": 2}, PACKED, True),
        ({"data": 2, "expert_tensor": 2}, THREES, False),
        ({"data": 2}, SELECTIVE, True),
        ({**_SP, "expert": 2}, RECOMPUTED, False),
        ({**_SP, "expert_tensor": 2}, PACKED, True),
        (_SP, THREES, False),
        (_VPP, TWOS, True),
        ({"context": 2, "expert": 2}, PACKED, False),
        ({**_SP, "data": 2, "expert": 2}, PACKED, True),
        ({**_SP, "data": 2, "expert": 2, "expert_tensor": 2}, THREES, False),
        ({**_LONG_START, "data": 2, "expert": 2}, PACKED, True),
        ({**_VPP, **_SP, "expert_tensor": 2}, THREES, False),
        ({**_SP, "context": 2, "data": 2, "expert": 4}, PACKED, True),
    ],
    "experts, tied": [
        ({}, WHOLE, False),
        ({"pipeline": 2}, THREES, False),
        ({"data": 2, "expert": 2}, ONES, True),
    ],
    "experts, replayed": [
        ({}, WHOLE, False),
        ({}, RECOMPUTED, False),
        (_SP, THREES, False),
        ({"context": 2}, THREE_MICROBATCHES, False),
        ({"context": 2, "expert": 2}, PACKED, False),
        ({"pipeline": 2}, RECOMPUTED, False),
        (_VPP, THREE_MICROBATCHES, True),
        ({"data": 2, "expert": 2}, FUSED, False),
        ({**_SP, **_VPP, "expert_tensor": 2}, RECOMPUTED, False),
    ],
    "mixtral": [
        ({}, WHOLE, False),
        ({**_SP, "expert": 2}, PACKED, True),
    ],
    "glm4": [
        ({}, WHOLE, False),
        (_SP, PACKED, False),
        (_VPP, THREE_MICROBATCHES, True),
    ],
    "glm4_moe": [
        ({}, WHOLE, False),
        ({**_SP, "expert_tensor": 2}, THREES, False),
        ({"context": 2, "expert": 2}, PACKED, False),
        (_LONG_START, THREES, True),
    ],
    "deepseek_v2": [
        ({}, WHOLE, False),
        ({"pipeline": 2}, SELECTIVE, True),
    ],
    "deepseek_v3": [
        ({}, WHOLE, False),
        ({"context": 2}, THREES, False),
        ({"pipeline": 2}, {**THREES, "recompute": "full"}, False),
        ({"data": 2, "expert": 2}, ONES, True),
        ({"data": 2, "expert": 2}, PACKED, False),
    ],
}

CASES: tuple[Case, ...] = tuple(
    Case(model=model, layout=layout, train=train, sharded=sharded)
    for model, cuts in _CUTS.items()
    for layout, train, sharded in cuts
)
"""The first case of each model is the reference."""


def world_size(case: Case) -> int:
    axes = ("tensor", "pipeline", "context", "data")
    return math.prod(int(case.layout.get(axis, 1)) for axis in axes)


def measure(cases: Sequence[Case], directory: Path) -> list[Errors]:
    """Train every case and compare it with the first case of its model, which must have one rank.

    Args:
        cases: those of one model may be apart.
        directory: for models and recordings; must be empty.
    """
    configs = make_configs(cases, directory)
    outcomes: dict[int, list[Outcome]] = {}
    for size in sorted({world_size(case) for case in cases}):
        chosen = [index for index, case in enumerate(cases) if world_size(case) == size]
        ranks = spawn(
            train_all,
            size,
            [configs[index] for index in chosen],
            num_rendezvous=len(chosen),
            timeout_s=900.0,
        )
        for place, index in enumerate(chosen):
            outcomes[index] = [of_rank[place] for of_rank in ranks]
    references: dict[str, Outcome] = {}
    errors = []
    for index, case in enumerate(cases):
        reference = references.setdefault(case.model, outcomes[index][0])
        errors.append(compare(outcomes[index], reference))
    return errors


def compare(ranks: Sequence[Outcome], reference: Outcome) -> Errors:
    """The largest errors over ranks: each must report the same."""
    want_gradients, want_steps, want_weights = reference
    gradients = [_tensor_error(of_rank[0], want_gradients) for of_rank in ranks if of_rank[0]]
    router = tuple(name for name in ROUTER if name in want_steps[0])
    return Errors(
        loss=max(_metric_error(steps, want_steps, LOSS) for _, steps, _ in ranks),
        trust=max(_metric_error(steps, want_steps, (*TRUST, *router)) for _, steps, _ in ranks),
        gradients=max(gradients) if gradients else None,
        weights=max(_tensor_error(weights, want_weights) for _, _, weights in ranks),
    )


def train_all(configs: list[RunConfig]) -> list[Outcome]:
    """Run on a rank: one step's gradients, then the whole run, of every configuration in turn."""
    results = []
    for config in configs:
        layout = ParallelLayout.for_world(config.layout, int(os.environ["WORLD_SIZE"]))
        context = initialize(layout, seed=0)
        policy = Policy(config, read_architecture(config.model.path), context)
        rollouts = RecordedRollouts(ReplayRollouts(Path(str(config.rollout.replay_path))))
        gradients = first_gradients(policy, rollouts, context)
        sink = Kept()
        train(
            config,
            policy,
            rollouts,
            CheckpointStore(RunDir(Path(config.run.dir)), context, keep=1),
            Observers(sinks=[sink], recorder=None, display=SilentDisplay()),
            identity={},
            first_step=0,
        )
        weights = {name: tensor.clone() for name, tensor in policy.named_tensors()}
        results.append((gradients, sink.steps, weights))
        shut_down()
        if config is not configs[-1]:
            next_rendezvous()
    return results


def first_gradients(
    policy: Policy, rollouts: RecordedRollouts, context: ParallelContext
) -> dict[str, Tensor]:
    """Whole gradients by Hugging Face name, complete on every rank; no step is taken.

    Scoring must have given the log-probs of the train pass, bit for bit.
    """
    batch = policy.microbatches(score_groups(rollouts.collect(0).groups, policy.config))
    scores = policy.score(batch)
    trust = policy.trust(batch, scores)
    results = policy._runner.train(batch, policy._loss(trust), with_entropy=True)
    for scored, result in zip(scores, results, strict=True):
        assert torch.equal(scored.logprobs, result.logprobs)
    if policy.config.optimizer.distributed:
        return {}
    architecture = read_architecture(policy.config.model.path)
    rows = rows_by_megatron_name(architecture)
    gradients = {
        # The biases that choose experts have none.
        rows[name].megatron: getattr(tensor, "main_grad", torch.zeros_like(tensor))
        for name, tensor in policy.model.named_weights()
    }
    gather = ShardGatherer(
        gradients,
        {row.megatron for row in rows.values() if row.expert},
        context,
    )
    return {name: grad.clone() for name, grad in hf_tensors(architecture, gather)}


def make_configs(cases: Sequence[Case], directory: Path) -> list[RunConfig]:
    inputs: dict[str, tuple[Path, Path]] = {}
    for number, name in enumerate(dict.fromkeys(case.model for case in cases)):
        options = dict(MODELS[name])
        model = make_model(directory / str(number), options.pop("family"), **options)
        recording = directory / f"{number}.jsonl"
        make_recording(
            recording,
            model,
            steps=STEPS,
            groups=GROUPS,
            group_size=GROUP_SIZE,
            noise=0.4,
            routed=REPLAYED.get(name),
        )
        inputs[name] = (model, recording)
    return [
        replay_config(
            *inputs[case.model],
            steps=STEPS,
            groups=GROUPS,
            group_size=GROUP_SIZE,
            model={"router_replay": case.model in REPLAYED},
            layout=dict(case.layout),
            train={
                "steps": STEPS,
                "prompts_per_step": GROUPS,
                "samples_per_prompt": GROUP_SIZE,
                "logprob_chunk_tokens": 11,
                **case.train,
            },
            # Adam divides by the gradient's own size, and experts with few tokens have entries
            # that are nothing but rounding; a larger eps keeps those from moving weights.
            optimizer={
                "lr": 1e-3,
                "weight_decay": 0.1,
                "eps": 1e-5,
                "distributed": case.sharded,
            },
        )
        for case in cases
    ]


def _metric_error(
    steps: Sequence[Mapping[str, float]],
    reference: Sequence[Mapping[str, float]],
    names: Sequence[str],
) -> float:
    return max(
        abs(got[name] - want[name]) / max(abs(want[name]), 1e-2)
        for got, want in zip(steps, reference, strict=True)
        for name in names
    )


def _tensor_error(tensors: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    assert tensors.keys() == reference.keys()
    return max(
        float((tensors[name] - want).abs().max() / want.abs().max().clamp_min(1e-30))
        for name, want in reference.items()
    )
