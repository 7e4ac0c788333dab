"""Tokens sent to recorded experts, against transformers with its routers forced to them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_p3o.config import RunConfig
from megatron_p3o.parallel.setup import shut_down
from megatron_p3o.rollout import ReplayRollouts
from megatron_p3o.trainer.experience import score_groups
from megatron_p3o.types import Sample
from tests.dist.harness import next_rendezvous, spawn
from tests.dist.models import forced_experts, make_model, make_recording, replay_config
from tests.dist.test_policy import make_policy


def logprobs_and_disagreement(configs: list[RunConfig]) -> list[tuple[dict[str, Tensor], float]]:
    """Run on a rank: log-probs by sample name, and the share of choices that were not its own."""
    results = []
    for config in configs:
        policy, _ = make_policy(config)
        groups = ReplayRollouts(Path(str(config.rollout.replay_path))).groups(0)
        batch = policy.microbatches(score_groups(groups, config))
        scores = policy.score(batch)
        logprobs = {
            scored.sample.name: score.logprobs[microbatch.token_samples == index]
            for microbatch, score in zip(batch, scores, strict=True)
            for index, scored in enumerate(microbatch.samples)
        }
        stats = policy._runner.routers.stats()
        assert stats is not None
        results.append((logprobs, stats.replay_disagreement))
        shut_down()
        if config is not configs[-1]:
            next_rendezvous()
    return results


def forced(model: Any, sample: Sample) -> tuple[Tensor, float]:
    """Log-probs of the response with the sample's experts, and how many are not the model's."""
    first = len(sample.prompt_ids) - 1
    tokens = torch.tensor([[*sample.prompt_ids, *sample.response_ids[:-1]]])
    with torch.no_grad(), forced_experts(model, sample.routed_experts) as differing:
        logits = model(tokens).logits[0, first:].double()
    logp = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(sample.response_ids)[:, None])
    return logp[:, 0], float(sum(layer[first:].sum() for layer in differing))


@pytest.mark.parametrize("normalize", [True, False])
def test_the_trainer_computes_with_the_recorded_experts(tmp_path: Path, normalize: bool) -> None:
    assert_replayed(tmp_path, normalize=normalize, tolerance=2e-5)


def assert_replayed(tmp_path: Path, *, normalize: bool, tolerance: float) -> None:
    """Log-probs and the share of foreign choices, against transformers forced to the experts."""
    model_dir = make_model(tmp_path / "model", "qwen3_moe", tied=False, norm_topk_prob=normalize)
    recording = make_recording(
        tmp_path / "samples.jsonl",
        model_dir,
        steps=1,
        groups=2,
        group_size=2,
        noise=0.1,
        routed=(4, 2, 4),
    )
    config = replay_config(
        model_dir, recording, steps=1, groups=2, group_size=2, model={"router_replay": True}
    )
    ((got, disagreement),) = spawn(logprobs_and_disagreement, 1, [config])[0]
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    samples = [s for group in ReplayRollouts(recording).groups(0) for s in group.samples]
    num_differing, num_tokens = 0.0, 0
    for sample in samples:
        want, differing = forced(model, sample)
        torch.testing.assert_close(got[sample.name].double().cpu(), want, rtol=0, atol=tolerance)
        num_differing += differing
        num_tokens += sample.num_response_tokens
    assert disagreement == pytest.approx(num_differing / (num_tokens * 4 * 2))
    assert disagreement > 0.2  # or nothing was forced
