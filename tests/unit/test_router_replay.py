"""Recorded choices of experts: how they are kept, checked, reported by the engine and replayed."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3MoeConfig

from megatron_p3o.architecture import MoeArchitecture
from megatron_p3o.errors import InputError
from megatron_p3o.parallel.router_replay import LayerReplay
from megatron_p3o.rollout import ReplayRollouts
from megatron_p3o.types import RoutedExperts, Sample
from tests.unit.test_embedded import REQUESTS, engine_for, random_model


@given(st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(1, 4)), st.integers(0, 2**31))
def test_experts_survive_their_text(shape: tuple[int, int, int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    experts = torch.randint(0, 2**15, shape, generator=generator)
    kept = RoutedExperts.from_tensor(experts)
    assert kept.shape == shape
    assert torch.equal(kept.tensor().long(), experts)


def test_experts_are_little_endian_int16() -> None:
    kept = RoutedExperts.from_tensor(torch.tensor([[[1, 258]]]))
    assert kept.data == "AQACAQ=="
    assert RoutedExperts(shape=(2, 1, 1), data="AQACAQ==").tensor().tolist() == [[[1]], [[258]]]


def sample(experts: RoutedExperts | None) -> Sample:
    return Sample(
        prompt_id="p",
        sample_index=0,
        prompt_ids=(4, 5),
        response_ids=(6, 7),
        rollout_logprobs=(-0.5, -0.25),
        finish_reason="stop",
        weight_version_min=0,
        weight_version_max=0,
        reward=1.0,
        routed_experts=experts,
    )


def test_a_sample_with_experts_survives_json() -> None:
    one = sample(RoutedExperts.from_tensor(torch.arange(6).view(3, 1, 2)))
    assert Sample.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert Sample.from_json(json.loads(json.dumps(sample(None).to_json()))).routed_experts is None


@pytest.mark.parametrize(
    ("shape", "data", "message"),
    [
        ((1, 1, 2), "AQACAQ=", "not base64"),
        ((1, 1, 1), "AQACAQ==", r"has 4 bytes for shape \(1, 1, 1\)"),
    ],
)
def test_experts_that_contradict_their_shape(
    shape: tuple[int, int, int], data: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RoutedExperts(shape=shape, data=data)


def test_experts_of_another_sequence() -> None:
    with pytest.raises(ValueError, match="routed_experts has 4 tokens but 3 enter the model"):
        sample(RoutedExperts.from_tensor(torch.zeros(4, 1, 2)))


def test_a_recording_must_hold_the_models_experts(tmp_path: Path) -> None:
    moe = MoeArchitecture(
        num_experts=4, experts_per_token=2, ffn_hidden_size=8, normalize_topk=True, layers=(1,)
    )
    fitting = RoutedExperts.from_tensor(torch.tensor([[[0, 1]], [[3, 2]], [[1, 3]]]))
    cases = {
        "has no routed_experts, which model.router_replay=true needs": None,
        "has 2 layers of 2 experts up to index 0; the model has 1 layers of 2 out of 4": (
            RoutedExperts.from_tensor(torch.zeros(3, 2, 2))
        ),
        "has 1 layers of 2 experts up to index 4": (
            RoutedExperts.from_tensor(torch.full((3, 1, 2), 4))
        ),
    }
    path = tmp_path / "samples.jsonl"
    for message, experts in cases.items():
        lines = [json.dumps({"step": 0, **sample(e).to_json()}) for e in (fitting, experts)]
        path.write_text("\n".join(lines))
        assert ReplayRollouts(path).steps() == [0]
        with pytest.raises(InputError, match=f"line 2: .*{message}"):
            ReplayRollouts(path, replayed_moe=moe)
    path.write_text(lines[0])
    assert ReplayRollouts(path, replayed_moe=moe).steps() == [0]


def test_the_engine_reports_what_its_routers_choose(tmp_path: Path) -> None:
    Qwen3MoeConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        mlp_only_layers=[1],
        tie_word_embeddings=False,
    ).save_pretrained(tmp_path)
    model = random_model(tmp_path, seed=0)
    weights = tmp_path / "weights"
    model.save_pretrained(weights)
    chosen: list[Tensor] = []
    for layer in (0, 2):
        model.model.layers[layer].mlp.gate.register_forward_hook(
            lambda module, inputs, output: chosen.append(output[2])
        )
    stored = load_file(weights / "model.safetensors")
    # A batch smaller than a group, so that a group is decoded in parts.
    engine = engine_for(tmp_path, None, batch_size=3, report_experts=True)
    engine.update_weights(stored.items(), version=0)
    generations = engine.generate(REQUESTS)
    prompts = {request.prompt_id: request.prompt_ids for request in REQUESTS}
    lengths = set()
    for generation in generations:
        chosen.clear()
        tokens = [*prompts[generation.prompt_id], *generation.response_ids]
        with torch.no_grad():
            model(input_ids=torch.tensor([tokens[:-1]]))
        assert generation.routed_experts is not None
        got = generation.routed_experts.tensor().long()
        assert got.shape == (len(tokens) - 1, 2, 2)
        assert torch.equal(got.sort().values, torch.stack(chosen, dim=1).sort().values)
        lengths.add(len(generation.response_ids))
    assert len(lengths) > 1  # some ended early, so rows were dropped from the batch
    silent = engine_for(tmp_path, None)
    silent.update_weights(stored.items(), version=0)
    assert all(g.routed_experts is None for g in silent.generate(REQUESTS[:1]))


def top2(scores: Tensor, k: int, num_groups: None, group_topk: None) -> tuple[Tensor, Tensor]:
    values, indices = torch.topk(scores, k)
    return values, indices


def test_a_layer_takes_the_recorded_experts() -> None:
    scores = torch.tensor([[0.1, 0.4, 0.2, 0.3], [4.0, 3.0, 2.0, 1.0], [0.0, 0.0, 9.0, 8.0]])
    scores.requires_grad_()
    replay = LayerReplay()
    replay.expect(torch.tensor([[2, 1], [3, 0], [-1, -1]]), is_recomputed=False)
    values, experts = replay.get_replay_topk(scores, 2, None, None, top2)
    assert experts.tolist() == [[2, 1], [3, 0], [2, 3]]
    torch.testing.assert_close(values, torch.tensor([[0.2, 0.4], [1.0, 4.0], [9.0, 8.0]]))
    assert replay.differs_NK is not None
    assert replay.differs_NK.tolist() == [[True, False], [True, False], [False, False]]
    values.sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[0, 1, 1, 0], [1, 0, 0, 1], [0, 0, 1, 1]]


def test_a_recomputed_pass_repeats_its_own_microbatch() -> None:
    """Two microbatches are under way when the first one's backward pass begins."""
    replay, scores = LayerReplay(), torch.zeros(1, 4)

    def experts() -> list[list[int]]:
        return replay.get_replay_topk(scores, 2, None, None, top2)[1].tolist()

    first, second, third = torch.tensor([[0, 1]]), torch.tensor([[2, 3]]), torch.tensor([[3, 0]])
    for target in (first, second):
        replay.expect(target, is_recomputed=True)
        with torch.no_grad():
            assert experts() == target.tolist()
    assert experts() == first.tolist()
    replay.expect(third, is_recomputed=True)
    with torch.no_grad():
        assert experts() == third.tolist()
    assert [experts(), experts()] == [second.tolist(), third.tolist()]
    replay.expect(first, is_recomputed=False)  # a scoring pass keeps nothing back
    assert experts() == first.tolist()
