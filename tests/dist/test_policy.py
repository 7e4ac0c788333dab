"""The Megatron model against transformers, and what a policy does when numbers go wrong."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_p3o.architecture import read_architecture
from megatron_p3o.config import RunConfig
from megatron_p3o.errors import NonFiniteError, RunError
from megatron_p3o.parallel.layout import ParallelLayout
from megatron_p3o.parallel.logprobs import token_logprobs
from megatron_p3o.parallel.setup import ParallelContext, initialize, shut_down
from megatron_p3o.trainer.policy import Policy
from megatron_p3o.types import LossOutput, Sample, ScoredSample, TokenStats
from tests.dist.harness import next_rendezvous, spawn
from tests.dist.models import VOCAB, make_model, replay_config


def make_policy(config: RunConfig) -> tuple[Policy, ParallelContext]:
    layout = ParallelLayout.for_world(config.layout, int(os.environ["WORLD_SIZE"]))
    context = initialize(layout, seed=0)
    return Policy(config, read_architecture(config.model.path), context), context


def sample(
    name: str, prompt: list[int], response: list[int], logprob: float = -1.0
) -> ScoredSample:
    return ScoredSample(
        sample=Sample(
            prompt_id=name,
            sample_index=0,
            prompt_ids=tuple(prompt),
            response_ids=tuple(response),
            rollout_logprobs=(logprob,) * len(response),
            finish_reason="stop",
            weight_version_min=0,
            weight_version_max=0,
        ),
        advantage=1.0,
    )


def config_for(model: Path, layout: dict[str, int], **sections: dict) -> RunConfig:
    return replay_config(
        model, Path("unused"), steps=1, groups=1, group_size=2, layout=layout, **sections
    )


TOKENS = [[5, 17, 42, 99, 3, 3, 100, 8], [7, 2, 64, 31]]


def logits_and_weights(
    configs: list[RunConfig],
) -> list[tuple[list[torch.Tensor] | None, dict[str, torch.Tensor]]]:
    """(whole logits of each of TOKENS, on the last stage; exported weights) per configuration."""
    results = []
    for config in configs:
        policy, context = make_policy(config)
        batch = policy.microbatches([sample(str(i), t[:1], t[1:]) for i, t in enumerate(TOKENS)])
        logits: list[torch.Tensor] | None = None
        if context.layout.pipeline == 1:
            with torch.no_grad():
                hidden = policy.model.wrapped(batch[0].input_ids, batch[0].position_ids, None)
                local = hidden @ policy.model.output_weight().t()
                shards = [torch.empty_like(local) for _ in range(context.layout.tensor)]
                dist.all_gather(shards, local.contiguous(), group=context.tensor_group)
            whole = torch.cat(shards, dim=-1)[..., :VOCAB]
            logits = [whole[row, : len(tokens) - 1] for row, tokens in enumerate(TOKENS)]
        weights = {name: tensor.clone() for name, tensor in policy.named_tensors()}
        results.append((logits, weights))
        shut_down()
        if config is not configs[-1]:
            next_rendezvous()
    return results


MODELS = [("llama", True), ("llama", False), ("qwen2", False), ("qwen3", True), ("qwen3", False)]


def test_logits_equal_transformers_and_weights_come_back_bitwise(tmp_path: Path) -> None:
    directories = [
        make_model(tmp_path / f"{family}-{tied}", family, tied=tied) for family, tied in MODELS
    ]
    for world_size, layouts in ((1, [{}]), (2, [{"tensor": 2}, {"pipeline": 2}])):
        configs = [config_for(model, layout) for model in directories for layout in layouts]
        ranks = spawn(logits_and_weights, world_size, configs, num_rendezvous=len(configs))
        for results in ranks:
            for config, (logits, weights) in zip(configs, results, strict=True):
                stored = load_file(Path(config.model.path) / "model.safetensors")
                assert weights.keys() == stored.keys()
                assert all(torch.equal(weights[name], stored[name]) for name in stored)
                assert (logits is None) == (config.layout.pipeline == 2)
                if logits is not None:
                    assert_logits(logits, config.model.path)


def assert_logits(logits: list[torch.Tensor], model_dir: str) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    for tokens, got in zip(TOKENS, logits, strict=True):
        with torch.no_grad():
            want = reference(torch.tensor([tokens[:-1]])).logits[0]
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def reinforce(index: int, stats: TokenStats) -> LossOutput:
    loss = -(stats.logprobs * stats.advantages).sum()
    return LossOutput(loss_sum=loss, num_tokens=stats.num_tokens)


def score_and_train_logprobs(configs: list[RunConfig]) -> list[list[torch.Tensor]]:
    results = []
    for config in configs:
        policy, context = make_policy(config)
        batch = policy.microbatches([sample(str(i), t[:1], t[1:]) for i, t in enumerate(TOKENS)])
        scores = policy.score(batch)
        trained = policy._runner.train(batch, reinforce, with_entropy=False)
        assert len(scores) == len(trained) == (len(batch) if context.is_last_stage else 0)
        for scored, result in zip(scores, trained, strict=True):
            assert torch.equal(scored.logprobs, result.logprobs)
        results.append([score.logprobs for score in scores])
        shut_down()
        if config is not configs[-1]:
            next_rendezvous()
    return results


def test_train_pass_repeats_the_score_pass_bitwise(tmp_path: Path) -> None:
    model_dir = make_model(tmp_path / "model", "qwen3", tied=True)
    train = {"steps": 1, "prompts_per_step": 1, "samples_per_prompt": 2, "microbatch_size": 1}
    configs = [
        config_for(model_dir, layout, train={**train, "recompute": recompute})
        for layout in ({"tensor": 2}, {"pipeline": 2}, {"data": 2})
        for recompute in ("none", "full")
    ]
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    want = []
    for tokens in TOKENS:
        with torch.no_grad():
            logp = torch.log_softmax(reference(torch.tensor([tokens])).logits[0], dim=-1)
        want.append(logp[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0])
    last_rank = spawn(score_and_train_logprobs, 2, configs, num_rendezvous=len(configs))[1]
    # Data parallel ranks hold one sample each; elsewhere the last rank holds both, longest first.
    for got in last_rank:
        for ours, theirs in zip(got, want if len(got) == 2 else want[1:], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def parallel_logprobs() -> tuple[torch.Tensor, ...]:
    context = initialize(ParallelLayout(tensor=2), seed=0)
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 6), torch.randn(16, 6)
    labels = torch.randint(0, 13, (9,))
    weights = torch.randn(2, 9)
    hidden.requires_grad_()
    local = weight.chunk(2)[context.coordinates.tensor].clone().requires_grad_()
    logprobs, entropy = token_logprobs(
        hidden,
        local,
        labels,
        temperature=0.7,
        vocab_size=13,
        chunk_tokens=4,
        tensor_group=context.tensor_group,
        with_entropy=True,
    )
    (logprobs * weights[0] + entropy * weights[1]).sum().backward()
    assert hidden.grad is not None and local.grad is not None
    shut_down()
    return logprobs.detach(), entropy.detach(), hidden.grad, local.grad


def test_vocabulary_parallel_logprobs_equal_log_softmax() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 6).double(), torch.randn(16, 6).double()
    labels = torch.randint(0, 13, (9,))
    weights = torch.randn(2, 9).double()
    hidden.requires_grad_()
    weight.requires_grad_()
    logp = torch.log_softmax(hidden @ weight[:13].t() / 0.7, dim=-1)
    entropy = -(logp.exp() * logp).sum(-1)
    picked = logp[torch.arange(9), labels]
    (picked * weights[0] + entropy * weights[1]).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    for rank, (got_logp, got_entropy, got_hidden, got_weight) in enumerate(
        spawn(parallel_logprobs, 2)
    ):
        close = {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(got_logp.double(), picked.detach(), **close)
        torch.testing.assert_close(got_entropy.double(), entropy.detach(), **close)
        torch.testing.assert_close(got_hidden.double(), hidden.grad, **close)
        torch.testing.assert_close(got_weight.double(), weight.grad.chunk(2)[rank], **close)


def failures(configs: list[RunConfig]) -> list[list[str]]:
    """For every configuration, the error of every kind of bad batch."""
    messages = []
    for config in configs:
        messages.append(failures_of_one_rank(config))
        if config is not configs[-1]:
            next_rendezvous()
    return messages


def failures_of_one_rank(config: RunConfig) -> list[str]:
    """The error of every kind of bad batch; each must reach both ranks and step nothing."""
    policy, context = make_policy(config)
    before = {name: p.detach().clone() for name, p in policy.model.named_weights()}
    good = [sample(str(i), t[:1], t[1:]) for i, t in enumerate(TOKENS)]
    messages = []

    def attempt(samples: list[ScoredSample]) -> None:
        batch = policy.microbatches(samples)
        scores = policy.score(batch)
        try:
            policy.update(batch, policy.trust(batch, scores))
        except RunError as error:
            messages.append(f"{type(error).__name__}: {error}")

    attempt([good[0], sample("bad", [7, 8, 9], [2, 64], logprob=float("nan"))])
    attempt([good[0], sample("far", [7], [2, 64], logprob=-900.0)])
    attempt([sample("empty", [7], []), sample("void", [9], [])])
    for name, parameter in policy.model.named_weights():
        assert torch.equal(before[name], parameter), name
    if context.rank == 1:
        with torch.no_grad():
            next(iter(dict(policy.model.named_weights()).values())).fill_(float("nan"))
    attempt(good)
    assert policy.weight_version == 0
    shut_down()
    return messages


def test_a_fault_on_one_rank_is_named_on_all(tmp_path: Path) -> None:
    model_dir = make_model(tmp_path / "model", "llama", tied=True)
    packing = {
        **{"steps": 1, "prompts_per_step": 1, "samples_per_prompt": 2},
        **{"packing": True, "max_tokens_per_microbatch": 16},
    }
    configs = [
        config_for(model_dir, {"data": 2}),
        config_for(model_dir, {"context": 2}),
        config_for(model_dir, {"context": 2}, train=packing),
    ]
    ranks = spawn(failures, 2, configs, num_rendezvous=len(configs))
    for first, second in zip(*ranks, strict=True):
        assert first == second
        nan, far, empty, poisoned = first
        kind = NonFiniteError.__name__
        assert nan.startswith(f"{kind}: non-finite policy ratio; nothing was stepped")
        assert "sample bad/0, response position 0 (token id 2)" in nan
        assert "rollout log-prob nan" in nan
        assert "sample far/0, response position 0" in far
        assert empty.startswith("RunError: the optimizer step has no valid response token")
        # Only rank 1's weights are bad; the message names a sample of its share and the version.
        assert "trainer log-prob nan at weight version 0" in poisoned
