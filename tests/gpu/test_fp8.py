"""FP8 on a GPU: Transformer Engine's recipes in the trainer, emulated serving beside it."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_p3o.config import RunConfig
from megatron_p3o.parallel.fp8 import missing_support
from tests.dist.harness import spawn
from tests.gpu.test_cuda import config_on_gpu, score_update_export

RECIPES = ("fp8-delayed", "fp8-tensorwise", "fp8-blockwise", "fp8-mxfp8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of its matrices are whole blocks."""
    directory = tmp_path_factory.mktemp("models") / "fp8"
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).float().save_pretrained(directory)
    return directory


def of_precision(model: Path, precision: str, **fp8: object) -> RunConfig:
    config = config_on_gpu(model, precision)
    section = config.precision.model_copy(
        update={"fp8": config.precision.fp8.model_copy(update=fp8)}
    )
    return config.model_copy(update={"precision": section})


def check_close(config: RunConfig, exact: RunConfig) -> None:
    [(logprobs, grad_norm, weights, _)] = spawn(score_update_export, 1, config)
    [(expected, expected_norm, expected_weights, _)] = spawn(score_update_export, 1, exact)
    gap = (torch.cat(logprobs) - torch.cat(expected)).abs().mean()
    assert 1e-5 < gap < 0.1, "FP8 rounds, and not by much"
    assert grad_norm == pytest.approx(expected_norm, rel=0.3)
    assert weights.keys() == expected_weights.keys()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_scores_and_steps(recipe: str, model: Path) -> None:
    name = recipe.removeprefix("fp8-")
    problem = missing_support(name, torch.cuda.get_device_capability(), has_transformer_engine=True)
    if problem:
        pytest.skip(problem)
    check_close(of_precision(model, recipe), of_precision(model, "bf16"))


def test_weights_held_in_fp8_are_published_whole(model: Path) -> None:
    config = of_precision(model, "fp8-tensorwise", param_gather=True)
    [(_, _, weights, _)] = spawn(score_update_export, 1, config)
    [(_, _, exact, _)] = spawn(score_update_export, 1, of_precision(model, "bf16"))
    for name, tensor in weights.items():
        assert tensor.dtype is torch.bfloat16, name
        assert (tensor.float() - exact[name].float()).abs().max() <= exact[name].abs().max() / 8


def test_kept_layers_stay_in_bf16(model: Path) -> None:
    """With both layers kept out of FP8, nothing is rounded."""
    kept = of_precision(model, "fp8-tensorwise", bf16_layers_at_start=1, bf16_layers_at_end=1)
    [(logprobs, _, _, _)] = spawn(score_update_export, 1, kept)
    [(expected, _, _, _)] = spawn(score_update_export, 1, of_precision(model, "bf16"))
    # Sequences are padded further, which moves bf16's rounding.
    assert (torch.cat(logprobs) - torch.cat(expected)).abs().max() < 0.02
