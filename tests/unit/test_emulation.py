"""Emulated FP8 serving against transformers' own model with roundings written here."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from megatron_p3o.architecture import read_architecture
from megatron_p3o.config import parse_config
from megatron_p3o.numerics import E4M3, E5M2, round_to_format
from megatron_p3o.rollout import EmbeddedEngine
from megatron_p3o.trainer.served_model import embedded_engine
from megatron_p3o.weights.quantize import dequantize_blockwise, quantize_blockwise
from tests.unit.test_embedded import (
    EOS,
    REQUESTS,
    SEED,
    VOCABULARY,
    forced_logprobs,
    random_model,
    responses,
)

# Neither is a multiple of 128: blocks end early.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 160,
    "intermediate_size": 272,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "eos_token_id": list(EOS),
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 144,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, tie_word_embeddings=False),
}
PROMPTS = {request.prompt_id: request.prompt_ids for request in REQUESTS}
TOPS = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
FOUR_BIT = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {}
    for name, config in CONFIGS.items():
        directories[name] = tmp_path_factory.mktemp(name)
        config.save_pretrained(directories[name])
        model(directories[name]).save_pretrained(directories[name])
    return directories


def model(directory: Path) -> PreTrainedModel:
    made = random_model(directory, seed=0)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" not in name and "embed" not in name:
                parameter.mul_(0.3)
    return made


def engine_of(directory: Path, *, weights: PreTrainedModel, **changes: Any) -> EmbeddedEngine:
    """As a run makes it.

    Args:
        directory: of the model.
        weights: what it is given, by the names of a checkpoint.
        changes: fields of the configuration, by section.
    """
    tree: dict[str, Any] = {
        "run": {"dir": "unused", "seed": SEED},
        "model": {"path": str(directory)},
        "data": {"source": "generator", "generator": "arithmetic"},
        "train": {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2},
        "sampling": {"max_new_tokens": 5},
    }
    for section, fields in changes.items():
        tree[section] = tree.get(section, {}) | fields
    engine = embedded_engine(
        parse_config(tree), read_architecture(str(directory)), torch.device("cpu")
    )
    engine.update_weights(by_name(weights).items(), version=0)
    return engine


def by_name(weights: PreTrainedModel) -> dict[str, Tensor]:
    """Tensors as a checkpoint names them: experts apart."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in weights.named_parameters():
        prefix, _, stacked = name.rpartition(".experts.")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
        if not prefix:
            tensors[name] = parameter.detach()
            continue
        for expert, matrix in enumerate(parameter.detach()):
            for part, piece in zip(parts[stacked], matrix.chunk(len(parts[stacked])), strict=True):
                tensors[f"{prefix}.experts.{expert}.{part}.weight"] = piece.clone()
    return tensors


def nearest(values: Tensor, number_format: str) -> Tensor:
    if number_format == "e2m1":  # to the nearest of the list; ties are as good as impossible
        distance = (values.abs()[..., None] - FOUR_BIT).abs()
        return FOUR_BIT[distance.argmin(-1)] * values.sign()
    dtypes = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    return values.to(dtypes[number_format]).float()


def row_by_row(hidden: Tensor, length: int, number_format: str) -> Tensor:
    """[..., n] with a scale for each `length` neighbours of a row."""
    parts = []
    for part in hidden.split(length, dim=-1):
        largest = part.abs().amax(-1, keepdim=True)
        scale = torch.where(largest > 0, largest / TOPS[number_format], torch.ones_like(largest))
        parts.append(nearest(part / scale, number_format) * scale)
    return torch.cat(parts, dim=-1)


def in_squares(weight: Tensor, number_format: str) -> Tensor:
    if number_format == "e4m3":
        return dequantize_blockwise(*quantize_blockwise(weight))
    bands = []
    for band in weight.split(128):
        parts = []
        for part in band.split(128, dim=1):
            scale = part.abs().max() / TOPS[number_format]
            parts.append(nearest(part / scale, number_format) * scale)
        bands.append(torch.cat(parts, dim=1))
    return torch.cat(bands)


def at_once(weight: Tensor, number_format: str) -> Tensor:
    scale = weight.abs().max() / TOPS[number_format]
    return nearest(weight / scale, number_format) * scale


Round = Callable[[Tensor], Tensor]
BLOCK: tuple[Round, Round] = (
    lambda weight: in_squares(weight, "e4m3"),
    lambda hidden: row_by_row(hidden, 128, "e4m3"),
)
SERVED: dict[str, tuple[dict[str, str], Round, Round | None]] = {
    "block": ({"rollout": "fp8-block"}, *BLOCK),
    "tensor": (
        {"rollout": "fp8-tensor"},
        lambda weight: at_once(weight, "e4m3"),
        lambda hidden: row_by_row(hidden, hidden.shape[-1], "e4m3"),
    ),
    "weights alone": (
        {"rollout": "fp8-block", "rollout_activations": "unquantized"},
        BLOCK[0],
        None,
    ),
    "e5m2": (
        {"rollout": "fp8-block", "rollout_format": "e5m2"},
        lambda weight: in_squares(weight, "e5m2"),
        lambda hidden: row_by_row(hidden, 128, "e5m2"),
    ),
    "four bits": (
        {"rollout": "fp8-tensor", "rollout_format": "e2m1"},
        lambda weight: at_once(weight, "e2m1"),
        lambda hidden: row_by_row(hidden, hidden.shape[-1], "e2m1"),
    ),
}


@torch.no_grad()
def rounded_model(directory: Path, weight: Round, hidden: Round | None) -> PreTrainedModel:
    """transformers' model with the decoder's linear layers rounded, experts token by token."""
    made = model(directory)
    for name, module in made.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.weight.copy_(weight(module.weight))
            if hidden is not None:
                module.register_forward_pre_hook(lambda _, inputs: (hidden(inputs[0]),))
        elif name.endswith(".experts"):
            for expert in range(len(module.gate_up_proj)):
                gate, up = module.gate_up_proj[expert].chunk(2)
                module.gate_up_proj[expert] = torch.cat([weight(gate), weight(up)])
                module.down_proj[expert] = weight(module.down_proj[expert])
            module.forward = plain_experts(module, hidden or (lambda values: values))
    return made


def plain_experts(module: Any, rounded: Round) -> Callable[..., Tensor]:
    def forward(hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        rows = []
        for token, experts, weights in zip(hidden, chosen.tolist(), shares, strict=True):
            total = torch.zeros_like(token)
            for expert, share in zip(experts, weights, strict=True):
                gate, up = (module.gate_up_proj[expert] @ rounded(token[None])[0]).chunk(2)
                inner = rounded((nn.functional.silu(gate) * up)[None])[0]
                total = total + share * (module.down_proj[expert] @ inner)
            rows.append(total)
        return torch.stack(rows)

    return forward


def assert_logprobs(
    engine: EmbeddedEngine, expected: PreTrainedModel, temperature: float = 1.0
) -> list[tuple[Sequence[int], tuple[float, ...]]]:
    """Of every sample, within 1e-5. Gives prompts with responses, and the log-probs."""
    found = []
    for g in engine.generate(REQUESTS):
        prompt = PROMPTS[g.prompt_id]
        wanted = forced_logprobs(expected, prompt, g.response_ids, temperature)
        assert g.logprobs == pytest.approx(wanted, abs=1e-5)
        found.append(((*prompt, *g.response_ids), g.logprobs))
    assert len({tokens for tokens, _ in found}) > 4
    return found


@pytest.mark.parametrize("served", SERVED)
@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_are_those_of_rounded_weights_and_inputs(
    models: dict[str, Path], name: str, served: str
) -> None:
    precision, weight, hidden = SERVED[served]
    directory = models[name]
    engine = engine_of(directory, weights=model(directory), precision=precision)
    found = assert_logprobs(engine, rounded_model(directory, weight, hidden))
    exact = model(directory)
    moved = []
    for tokens, logprobs in found:
        start = len(tokens) - len(logprobs)
        wanted = forced_logprobs(exact, tokens[:start], tokens[start:], 1.0)
        moved += [abs(a - b) for a, b in zip(logprobs, wanted, strict=True)]
    assert max(moved) > 1e-2  # what is compared above is not the exact model


@pytest.mark.parametrize("served", SERVED)
@pytest.mark.parametrize("name", CONFIGS)
def test_only_the_decoders_matrices_are_rounded(
    models: dict[str, Path], name: str, served: str
) -> None:
    precision, weight, _ = SERVED[served]
    given = by_name(model(models[name]))
    engine = engine_of(models[name], weights=model(models[name]), precision=precision)
    linear = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    rounded = {n for n in given if n.removesuffix(".weight").endswith(linear)}
    kept = {n.split(".")[-2] for n in given.keys() - rounded}
    expected = {"embed_tokens", "norm", "input_layernorm", "post_attention_layernorm"}
    expected |= set() if name == "llama" else {"lm_head", "q_norm", "k_norm"}
    assert kept == expected | ({"gate"} if name == "qwen3_moe" else set())
    for tensor_name, tensor in given.items():
        held = engine._parameters[tensor_name]
        if tensor_name in rounded:
            torch.testing.assert_close(held, weight(tensor), rtol=2e-7, atol=0)
            assert not torch.equal(held, tensor)
        else:
            assert torch.equal(held, tensor)


class CastingCache(DynamicCache):
    """Keys and values through torch's cast."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        top = torch.finfo(self.dtype).max
        keys, values = (
            states.clamp(-top, top).to(self.dtype).float() for states in (key_states, value_states)
        )
        return super().update(keys, values, *args, **kwargs)


@pytest.mark.parametrize(
    ("kv_cache", "dtype"), [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)]
)
@pytest.mark.parametrize("rollout", ["fp32", "fp8-block"])
def test_attention_sees_the_rounded_cache(
    models: dict[str, Path], kv_cache: str, dtype: torch.dtype, rollout: str
) -> None:
    directory = models["qwen3"]
    precision = {"rollout": rollout, "rollout_kv_cache": kv_cache}
    engine = engine_of(directory, weights=model(directory), precision=precision)
    expected = rounded_model(directory, *BLOCK) if rollout == "fp8-block" else model(directory)
    for g in engine.generate(REQUESTS):
        prompt = PROMPTS[g.prompt_id]
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *g.response_ids]])
            cache = CastingCache(dtype)
            logits = expected(input_ids=ids, past_key_values=cache, use_cache=True).logits
        logp = torch.log_softmax(logits[0].double(), dim=1)[len(prompt) - 1 : -1]
        wanted = logp[range(len(g.response_ids)), list(g.response_ids)].tolist()
        assert g.logprobs == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(("kv_cache", "number_format"), [("fp8_e4m3", E4M3), ("fp8_e5m2", E5M2)])
def test_the_cache_holds_rounded_numbers_that_selection_does_not_move(
    models: dict[str, Path], kv_cache: str, number_format: Any
) -> None:
    directory, weights = models["llama"], model(models["llama"])
    rounding = engine_of(directory, weights=weights, precision={"rollout_kv_cache": kv_cache})
    exact = engine_of(directory, weights=weights)
    with torch.inference_mode():
        cache, exact_cache = (engine._prefill(REQUESTS[:3])[0] for engine in (rounding, exact))
        chosen = torch.tensor([2, 0, 0])
        selected = rounding._select(cache, chosen)
    first, exact_first = cache.layers[0], exact_cache.layers[0]
    for held, plain in ((first.keys, exact_first.keys), (first.values, exact_first.values)):
        assert torch.equal(held, round_to_format(plain, number_format))
        assert not torch.equal(held, plain)
    for before, after in zip(cache.layers, selected.layers, strict=True):
        assert torch.equal(round_to_format(before.keys, number_format), before.keys)
        assert torch.equal(after.keys, before.keys[chosen])
        assert torch.equal(after.values, before.values[chosen])


def test_an_exact_engine_is_left_as_it_is(models: dict[str, Path]) -> None:
    for name, directory in models.items():
        engine = engine_of(directory, weights=model(directory))
        assert_logprobs(engine, model(directory))
        hooks = [m for m in engine._model.modules() if m._forward_pre_hooks]
        assert not hooks, name


SHIFT = {"rollout": {"temperature_shift": {"sampled_at": 1.6}}, "sampling": {"temperature": 0.8}}


def test_a_shifted_engine_samples_at_the_other_temperature(models: dict[str, Path]) -> None:
    directory, weights = models["llama"], model(models["llama"])
    shifted = engine_of(directory, weights=weights, **SHIFT).generate(REQUESTS)
    hot = engine_of(directory, weights=weights, sampling={"temperature": 1.6}).generate(REQUESTS)
    assumed = engine_of(directory, weights=weights, sampling=SHIFT["sampling"]).generate(REQUESTS)
    assert shifted == hot  # the same uniform numbers, the same log-probs
    assert responses(shifted) != responses(assumed)


def test_a_shift_can_be_hidden_from_the_trainer(models: dict[str, Path]) -> None:
    """log p at the assumed temperature is that of the exact logits divided by it."""
    directory, weights = models["llama"], model(models["llama"])
    shift = {"temperature_shift": {"sampled_at": 1.6, "logprobs": "assumed"}}
    hidden = engine_of(directory, weights=weights, rollout=shift, sampling=SHIFT["sampling"])
    open_ = engine_of(directory, weights=weights, **SHIFT)
    assert responses(hidden.generate(REQUESTS)) == responses(open_.generate(REQUESTS))
    assert_logprobs(hidden, weights, temperature=0.8)
    assert_logprobs(open_, weights, temperature=1.6)
