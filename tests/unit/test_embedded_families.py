"""The embedded engine takes every family's weights by the names of a checkpoint."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_p3o.config import SamplingSection
from megatron_p3o.rollout import EmbeddedEngine, GenerationRequest
from tests.dist.models import make_model

FAMILIES = ("mistral", "mixtral", "glm4", "glm4_moe", "deepseek_v2", "deepseek_v3")


@pytest.mark.parametrize("family", FAMILIES)
def test_generates_with_the_given_weights(family: str, tmp_path: Path) -> None:
    directory = make_model(tmp_path, family, tied=False)
    is_moe = family not in ("mistral", "glm4")
    engine = EmbeddedEngine(
        directory,
        sampling=SamplingSection(max_new_tokens=4),
        seed=3,
        batch_size=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
        eos_token_ids=(1,),
        report_experts=is_moe,
    )
    engine.update_weights(load_file(directory / "model.safetensors").items(), version=0)
    prompt = (5, 17, 42, 99)
    (generation,) = engine.generate(
        [GenerationRequest(prompt_id="a", prompt_ids=prompt, num_samples=1, step=0)]
    )
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *generation.response_ids[:-1]]])).logits[0, 3:]
    logp = torch.log_softmax(logits, dim=-1)
    want = [float(row[token]) for row, token in zip(logp, generation.response_ids, strict=True)]
    assert generation.logprobs == pytest.approx(want, abs=1e-5)
    assert (generation.routed_experts is not None) == is_moe
