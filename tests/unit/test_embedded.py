"""The embedded engine against transformers' own model, run without cache, padding or batches."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megatron_p3o.config import SamplingSection
from megatron_p3o.errors import NonFiniteError, RunError
from megatron_p3o.rollout import (
    EmbeddedEngine,
    Generation,
    GenerationRequest,
    SampleNoise,
    invert_cdf,
)

VOCABULARY, EOS, SEED = 24, (2, 5), 11
CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": False}),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": False, "head_dim": 16}),
}
# Ragged on purpose: the engine pads them on the left.
REQUESTS = [
    GenerationRequest(prompt_id="a", prompt_ids=(7,), num_samples=4, step=3),
    GenerationRequest(prompt_id="b", prompt_ids=(1, 9, 4, 4, 8, 20, 3), num_samples=4, step=3),
    GenerationRequest(prompt_id="c", prompt_ids=(23, 0, 6), num_samples=4, step=3),
    GenerationRequest(prompt_id="d", prompt_ids=(7,), num_samples=4, step=3),
]


def random_model(model_dir: Path, *, seed: int) -> PreTrainedModel:
    """A model of the directory's configuration whose distributions are far from flat."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir)).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        centre = 1.0 if "norm" in name else 0.0
        nn.init.normal_(parameter, mean=centre, std=0.3, generator=generator)
    return model


@pytest.fixture(scope="module", params=CONFIGS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    kind, fields = CONFIGS[request.param]
    shared: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    kind(**shared | fields).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def model(model_dir: Path) -> PreTrainedModel:
    return random_model(model_dir, seed=0)


def engine_for(
    model_dir: Path,
    model: PreTrainedModel | None,
    *,
    temperature: float = 1.0,
    max_new_tokens: int = 6,
    batch_size: int = 64,
    eos_token_ids: tuple[int, ...] = EOS,
    report_experts: bool = False,
) -> EmbeddedEngine:
    engine = EmbeddedEngine(
        model_dir,
        sampling=SamplingSection(temperature=temperature, max_new_tokens=max_new_tokens),
        seed=SEED,
        batch_size=batch_size,
        dtype=torch.float32,
        device=torch.device("cpu"),
        eos_token_ids=eos_token_ids,
        report_experts=report_experts,
    )
    if model is not None:
        engine.update_weights(model.named_parameters(), version=0)
    return engine


@torch.no_grad()
def forced_logprobs(
    model: PreTrainedModel, prompt_ids: Sequence[int], response_ids: Sequence[int], temp: float
) -> list[float]:
    """log_softmax(logits / temp) of the response tokens, from one plain forward pass."""
    logits = model(input_ids=torch.tensor([[*prompt_ids, *response_ids]])).logits[0].double()
    logp = torch.log_softmax(logits[len(prompt_ids) - 1 : -1] / temp, dim=1)
    return logp[range(len(response_ids)), list(response_ids)].tolist()


@torch.no_grad()
def sample_plainly(
    model: PreTrainedModel, request: GenerationRequest, sample_index: int, num_tokens: int
) -> tuple[int, ...]:
    """What a sample must be: the noise and the model, one token and one sample at a time."""
    noise = SampleNoise(SEED, request.step, request.prompt_id, sample_index)
    response: list[int] = []
    while len(response) < num_tokens and not (response and response[-1] in EOS):
        logits = model(input_ids=torch.tensor([[*request.prompt_ids, *response]])).logits[:, -1]
        uniform = torch.tensor([noise.uniform(len(response))], dtype=torch.float64)
        cdf = logits.softmax(dim=1).cumsum(dim=1, dtype=torch.float64)
        response.append(int(invert_cdf(cdf, uniform)))
    return tuple(response)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_logprobs_are_the_models_at_the_sampling_temperature(
    model_dir: Path, model: PreTrainedModel, temperature: float
) -> None:
    prompts = {request.prompt_id: request.prompt_ids for request in REQUESTS}
    generations = engine_for(model_dir, model, temperature=temperature).generate(REQUESTS)
    assert len(generations) == 16
    for g in generations:
        expected = forced_logprobs(model, prompts[g.prompt_id], g.response_ids, temperature)
        assert g.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_samples_are_those_of_a_plain_loop_for_every_batch_size(
    model_dir: Path, model: PreTrainedModel, batch_size: int
) -> None:
    generations = engine_for(model_dir, model, batch_size=batch_size).generate(REQUESTS)
    expected = [
        (request.prompt_id, index, sample_plainly(model, request, index, num_tokens=6))
        for request in REQUESTS
        for index in range(request.num_samples)
    ]
    assert [(g.prompt_id, g.sample_index, g.response_ids) for g in generations] == expected


def test_samples_do_not_depend_on_company_or_order(model_dir: Path, model: PreTrainedModel) -> None:
    engine = engine_for(model_dir, model)
    together = responses(engine.generate(REQUESTS))
    apart = {k: v for r in reversed(REQUESTS) for k, v in responses(engine.generate([r])).items()}
    shuffled = responses(engine.generate([REQUESTS[i] for i in (2, 0, 3, 1)]))
    assert apart == shuffled == together


def responses(generations: Sequence[Generation]) -> dict[tuple[str, int], tuple[int, ...]]:
    return {(g.prompt_id, g.sample_index): g.response_ids for g in generations}


def test_prompt_step_and_sample_each_bring_their_own_noise(
    model_dir: Path, model: PreTrainedModel
) -> None:
    engine = engine_for(model_dir, model, max_new_tokens=12, eos_token_ids=())
    later = GenerationRequest(prompt_id="a", prompt_ids=(7,), num_samples=4, step=4)
    generations = engine.generate([REQUESTS[0], REQUESTS[3], later])  # one prompt, three keys
    assert len({g.response_ids for g in generations}) == 12


def test_a_response_ends_with_its_first_end_token_or_at_full_length(
    model_dir: Path, model: PreTrainedModel
) -> None:
    generations = engine_for(model_dir, model).generate(REQUESTS)
    for g in generations:
        assert len(g.logprobs) == len(g.response_ids)
        assert not set(EOS) & set(g.response_ids[:-1])
        if g.response_ids[-1] in EOS:
            assert g.finish_reason == "stop"
        else:
            assert (g.finish_reason, len(g.response_ids)) == ("length", 6)
    assert {g.finish_reason for g in generations} == {"stop", "length"}
    assert len({len(g.response_ids) for g in generations if g.finish_reason == "stop"}) > 1


def test_an_end_token_in_the_last_place_counts_as_stop(
    model_dir: Path, model: PreTrainedModel
) -> None:
    everything = tuple(range(VOCABULARY))
    engine = engine_for(model_dir, model, max_new_tokens=1, eos_token_ids=everything)
    assert {g.finish_reason for g in engine.generate(REQUESTS)} == {"stop"}


@pytest.fixture
def embedded_shapes() -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the token ids that any model embeds during the test."""
    shapes: list[tuple[int, ...]] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(module, nn.Embedding):
            shapes.append(tuple(inputs[0].shape))

    handle = register_module_forward_hook(note)
    yield shapes
    handle.remove()


def test_each_prompt_is_prefilled_once_for_all_its_samples(
    model_dir: Path, model: PreTrainedModel, embedded_shapes: list[tuple[int, ...]]
) -> None:
    engine = engine_for(model_dir, model, max_new_tokens=3, eos_token_ids=())
    engine.generate(REQUESTS)
    # Four prompts padded to seven tokens, then 16 sequences token by token; the last token drawn
    # needs no forward pass.
    assert embedded_shapes == [(4, 7), (16, 1), (16, 1)]


def test_a_group_larger_than_the_batch_is_prefilled_once_too(
    model_dir: Path, model: PreTrainedModel, embedded_shapes: list[tuple[int, ...]]
) -> None:
    engine = engine_for(model_dir, model, max_new_tokens=2, batch_size=3, eos_token_ids=())
    engine.generate(REQUESTS[1:3])
    assert embedded_shapes == [(1, 7), (3, 1), (1, 1), (1, 3), (3, 1), (1, 1)]


def test_finished_sequences_leave_the_batch(
    model_dir: Path, model: PreTrainedModel, embedded_shapes: list[tuple[int, ...]]
) -> None:
    generations = engine_for(model_dir, model).generate(REQUESTS)
    going_on = [sum(len(g.response_ids) > n for g in generations) for n in range(1, 6)]
    assert embedded_shapes[1:] == [(count, 1) for count in going_on if count]
    assert going_on[-1] < 16


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_first_tokens_follow_the_softmax(
    model_dir: Path, model: PreTrainedModel, temperature: float
) -> None:
    num_samples, prompt = 4000, (1, 9, 4)
    request = GenerationRequest(prompt_id="a", prompt_ids=prompt, num_samples=num_samples, step=0)
    engine = engine_for(
        model_dir, model, temperature=temperature, max_new_tokens=1, batch_size=num_samples
    )
    drawn = torch.tensor([g.response_ids[0] for g in engine.generate([request])])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt])).logits[0, -1].double()
    expected = num_samples * torch.softmax(logits / temperature, dim=0)
    counts = torch.bincount(drawn, minlength=VOCABULARY).double()
    # Tokens too rare for the chi-square approximation count as one.
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    chi_square = float(((counts - expected) ** 2 / expected.clamp_min(1)).sum())
    degrees = len(expected) - 1
    assert degrees >= 5
    # Mean and four standard deviations of the chi-square distribution.
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5


def test_new_weights_change_the_samples_and_the_version(
    model_dir: Path, model: PreTrainedModel
) -> None:
    engine, other = engine_for(model_dir, model), random_model(model_dir, seed=1)
    before = engine.generate(REQUESTS)
    engine.update_weights(other.named_parameters(), version=5)
    after = engine.generate(REQUESTS)
    assert {g.version_spans[0].version for g in before} == {0}
    assert {g.version_spans[0].version for g in after} == {5}
    assert responses(after) == responses(engine_for(model_dir, other).generate(REQUESTS))
    assert responses(after) != responses(before)


def test_later_changes_of_the_published_tensors_do_not_reach_the_engine(
    model_dir: Path, model: PreTrainedModel
) -> None:
    tensors = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    engine = engine_for(model_dir, None)
    engine.update_weights(tensors.items(), version=0)
    for tensor in tensors.values():
        tensor.zero_()
    expected = engine_for(model_dir, model).generate(REQUESTS)
    assert engine.generate(REQUESTS) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"weights of version 9 lack model\.norm\.weight"),
        ("unknown", r"version 9: model\.extra \(3,\) .* no such tensor"),
        ("misshapen", r"version 9: model\.norm\.weight \(31,\) .* has \(32,\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_stop_generation(
    model_dir: Path, model: PreTrainedModel, change: str, message: str
) -> None:
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    if change == "missing":
        del tensors["model.norm.weight"]
    elif change == "unknown":
        tensors["model.extra"] = torch.zeros(3)
    else:
        tensors["model.norm.weight"] = torch.zeros(31)
    engine = engine_for(model_dir, model)
    with pytest.raises(RunError, match=message):
        engine.update_weights(tensors.items(), version=9)
    with pytest.raises(RunError, match="no complete weights"):
        engine.generate(REQUESTS)
    engine.update_weights(model.named_parameters(), version=10)
    assert {g.version_spans[0].version for g in engine.generate(REQUESTS)} == {10}


def test_nothing_is_generated_before_weights(model_dir: Path) -> None:
    with pytest.raises(RunError, match="no complete weights; publish them first"):
        engine_for(model_dir, None).generate(REQUESTS)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_found_at_the_first_token(
    model_dir: Path, model: PreTrainedModel, value: float
) -> None:
    broken: dict[str, Tensor] = dict(model.named_parameters())
    broken["model.norm.weight"] = torch.full((32,), value)
    engine = engine_for(model_dir, None)
    engine.update_weights(broken.items(), version=4)
    message = "prompt a, sample 0, response position 0 are NaN at weight version 4"
    with pytest.raises(NonFiniteError, match=message):
        engine.generate(REQUESTS)


def test_stacked_experts_take_the_tensors_of_a_checkpoint(tmp_path: Path) -> None:
    Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        tie_word_embeddings=False,
    ).save_pretrained(tmp_path)
    model = random_model(tmp_path, seed=0)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in stored
    engine = engine_for(tmp_path, None)
    engine.update_weights(stored.items(), version=0)
    for generation in engine.generate(REQUESTS):
        prompt = next(r.prompt_ids for r in REQUESTS if r.prompt_id == generation.prompt_id)
        wanted = forced_logprobs(model, prompt, generation.response_ids, 1.0)
        assert generation.logprobs == pytest.approx(wanted, abs=1e-5)
    del stored["model.layers.1.mlp.experts.3.up_proj.weight"]
    with pytest.raises(RunError, match=r"experts\.3\.up_proj"):
        engine.update_weights(stored.items(), version=1)
