"""Sequence parallel, context parallel and packing: the same update as one rank with padded rows."""

import os
from pathlib import Path

import pytest
import torch

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
from tests.dist.test_invariance import GROUP_SIZE, GROUPS, STEPS, Kept, Run, assert_same_update

Gradients = dict[str, torch.Tensor]

Options = dict[str, int | bool | str]
Case = tuple[Options, Options, bool]

PADDED: Options = {"microbatch_size": 3}
ONE_BY_ONE: Options = {"microbatch_size": 1}  # some context ranks then hold no response token
PACKED: Options = {"packing": True, "max_tokens_per_microbatch": 48}
FUSED: Options = {**PACKED, "scoring": "fused"}
RECOMPUTED: Options = {**PACKED, "recompute": "full"}

SEQUENCE: Options = {"tensor": 2, "sequence_parallel": True}
# [world size][(layout, how microbatches are made, whether the optimizer is sharded)]. Gradients are
# compared where it is not: a sharded one leaves each rank with its own part of them.
CASES: dict[int, list[Case]] = {
    1: [({}, PADDED, False), ({}, PACKED, False)],
    2: [
        (SEQUENCE, PADDED, False),
        (SEQUENCE, PACKED, True),
        ({"context": 2}, PADDED, False),
        ({"context": 2}, FUSED, False),
        ({"pipeline": 2}, RECOMPUTED, False),
        ({"data": 2}, PACKED, True),
    ],
    4: [
        ({**SEQUENCE, "context": 2}, PADDED, True),
        ({**SEQUENCE, "context": 2}, RECOMPUTED, False),
        ({**SEQUENCE, "pipeline": 2}, PACKED, False),
        ({"context": 2, "pipeline": 2}, PADDED, False),
        ({"context": 2, "pipeline": 2}, PACKED, True),
        ({"context": 2, "data": 2}, PACKED, True),
        ({"context": 4}, ONE_BY_ONE, False),
        ({"context": 4}, PACKED, True),
    ],
}
# A tied embedding gets gradient from both ends of the model.
TIED_CASES: dict[int, list[Case]] = {
    1: [({}, PADDED, False)],
    2: [(SEQUENCE, PACKED, False), ({"context": 2}, PADDED, False)],
    4: [({"context": 2, "pipeline": 2}, PACKED, False)],
}


def gradients_and_training(configs: list[RunConfig]) -> list[tuple[Gradients, Run]]:
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
        results.append((gradients, (sink.steps, weights)))
        shut_down()
        if config is not configs[-1]:
            next_rendezvous()
    return results


def first_gradients(
    policy: Policy, rollouts: RecordedRollouts, context: ParallelContext
) -> Gradients:
    """Whole gradients by Hugging Face name, complete on every rank; no step is taken.

    Scoring must have given the log-probs of the train pass, bit for bit.
    """
    batch = policy.microbatches(score_groups(rollouts.collect(0), policy.config))
    scores = policy.score(batch)
    trust = policy.trust(batch, scores)
    results = policy._runner.train(batch, policy._loss(trust), with_entropy=True)
    for scored, result in zip(scores, results, strict=True):
        assert torch.equal(scored.logprobs, result.logprobs)
    if policy.config.optimizer.distributed:
        return {}
    architecture = read_architecture(policy.config.model.path)
    rows = rows_by_megatron_name(architecture)
    gather = ShardGatherer(
        {rows[name].megatron: p.main_grad for name, p in policy.model.named_parameters()}, context
    )
    return {name: grad.clone() for name, grad in hf_tensors(architecture, gather)}


@pytest.mark.parametrize(
    ("family", "all_cases"), [("llama", TIED_CASES), ("qwen3", CASES)], ids=["tied", "untied"]
)
def test_one_rank_and_every_sequence_layout_agree(
    family: str, all_cases: dict[int, list[Case]], tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", family, tied=all_cases is TIED_CASES)
    recording = make_recording(
        tmp_path / "samples.jsonl",
        model,
        steps=STEPS,
        groups=GROUPS,
        group_size=GROUP_SIZE,
        noise=0.4,
    )
    common = {"steps": STEPS, "prompts_per_step": GROUPS, "samples_per_prompt": GROUP_SIZE}
    results: list[tuple[object, tuple[Gradients, Run]]] = []
    for world_size, cases in all_cases.items():
        configs = [
            replay_config(
                model,
                recording,
                steps=STEPS,
                groups=GROUPS,
                group_size=GROUP_SIZE,
                layout=layout,
                train={**common, "logprob_chunk_tokens": 11, **options},
                optimizer={"lr": 1e-3, "weight_decay": 0.1, "distributed": distributed},
            )
            for layout, options, distributed in cases
        ]
        ranks = spawn(gradients_and_training, world_size, configs, num_rendezvous=len(configs))
        for of_rank in ranks:  # every rank reports the same
            results += zip(cases, of_rank, strict=True)
    _, (want_gradients, want_run) = results[0]
    # The batch must be off-policy, or the comparison would not exercise the ESS.
    assert all(0.5 < step["ess/step"] < 0.95 for step in want_run[0])
    for case, (gradients, run) in results[1:]:
        assert_same_update(run, want_run, case)
        assert gradients.keys() == (set() if case[2] else want_gradients.keys())
        for name, gradient in gradients.items():
            want = want_gradients[name]
            error = float((gradient - want).abs().max() / want.abs().max())
            assert error < 1e-5, (case, name, error)
