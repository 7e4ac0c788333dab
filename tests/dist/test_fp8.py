"""Emulated FP8 training: what depends on the layout and what does not, and what resuming keeps."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_p3o.architecture import read_architecture
from megatron_p3o.config import RunConfig
from megatron_p3o.fp8_shapes import check_fp8
from megatron_p3o.parallel.gather import ShardGatherer
from megatron_p3o.parallel.layout import ParallelLayout
from megatron_p3o.parallel.setup import initialize, shut_down
from megatron_p3o.rollout import ReplayRollouts
from megatron_p3o.trainer.experience import RecordedRollouts, score_groups
from megatron_p3o.trainer.policy import Policy
from megatron_p3o.weights import hf_tensors, rows_by_megatron_name
from tests.dist.harness import next_rendezvous, spawn

RECIPES = ("fp8-delayed", "fp8-tensorwise", "fp8-blockwise", "fp8-mxfp8")
IN_BLOCKS = ("fp8-blockwise", "fp8-mxfp8")
GROUPS, GROUP_SIZE = 2, 4
# Halves of all its matrices are multiples of 128: heads (4 + 2 x 2) x 64, MLP 512, hidden 256.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_hidden_layers": 4,
    "initializer_range": 0.05,
}


@dataclass(frozen=True, kw_only=True)
class Update:
    """What one rank sees of one optimizer step; the same on every rank."""

    metrics: dict[str, float]
    logprobs: dict[tuple[str, int], float]
    """By sample and response position, of all ranks."""
    gradients: dict[str, Tensor]
    """Whole, by Hugging Face name; before clipping."""
    num_emulated: int
    """Linear layers of this rank that compute in FP8."""


def one_update(configs: list[RunConfig]) -> list[Update]:
    """Run on a rank: one optimizer step of each configuration on the recording's first step.

    Scoring must have given the log-probs of the train pass, bit for bit.
    """
    updates = []
    for config in configs:
        architecture = read_architecture(config.model.path)
        check_fp8(architecture, config)
        layout = ParallelLayout.for_world(config.layout, int(os.environ["WORLD_SIZE"]))
        context = initialize(layout, seed=0)
        policy = Policy(config, architecture, context)
        rollouts = RecordedRollouts(ReplayRollouts(Path(str(config.rollout.replay_path))))
        batch = policy.microbatches(score_groups(rollouts.collect(0).groups, config))
        batch = policy.with_reference(batch)
        scores = policy.score(batch)
        trust = policy.trust(batch, scores)
        results = policy._runner.train(batch, policy._loss(trust), with_entropy=True)
        mine = {}
        for microbatch, scored, result in zip(batch, scores, results, strict=False):
            assert torch.equal(scored.logprobs, result.logprobs)
            for index, logprob in enumerate(scored.logprobs.tolist()):
                mine[microbatch.locate_token(index)] = logprob
        rows = rows_by_megatron_name(architecture)
        gather = ShardGatherer(
            {rows[n].megatron: t.main_grad for n, t in policy.model.named_weights()},
            {row.megatron for row in rows.values() if row.expert},
            context,
        )
        emulation = policy.model.fp8_emulation
        gradients = {name: grad.clone() for name, grad in hf_tensors(architecture, gather)}
        metrics = policy._step(results, trust)
        updates.append(
            Update(
                metrics={name: float(metric.value) for name, metric in metrics.items()},
                logprobs={k: v for part in context.gather_objects(mine) for k, v in part.items()},
                gradients=gradients,
                num_emulated=0 if emulation is None else len(emulation),
            )
        )
        shut_down()
        if config is not configs[-1]:
            next_rendezvous()
    return updates


def update_all(world_size: int, configs: list[RunConfig]) -> list[list[Update]]:
    """[configuration][rank]."""
    ranks = spawn(one_update, world_size, configs, num_rendezvous=len(configs), timeout_s=600.0)
    return [list(of_config) for of_config in zip(*ranks, strict=True)]
