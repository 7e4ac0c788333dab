"""Every further family against transformers: logits, and weights that come back bitwise."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.dist.harness import spawn
from tests.dist.models import make_model
from tests.dist.test_policy import assert_logits, config_for, logits_and_weights

FAMILIES = ("mistral", "mixtral", "glm4", "glm4_moe", "deepseek_v2", "deepseek_v3")


def test_logits_equal_transformers_and_weights_come_back_bitwise(tmp_path: Path) -> None:
    directories = [
        make_model(tmp_path / f"{family}-{tied}", family, tied=tied)
        for family in FAMILIES
        for tied in (False, True)
    ]
    configs = [config_for(model, {}) for model in directories]
    (results,) = spawn(logits_and_weights, 1, configs, num_rendezvous=len(configs))
    for model, (logits, weights) in zip(directories, results, strict=True):
        stored = load_file(model / "model.safetensors")
        assert weights.keys() == stored.keys(), model
        assert all(torch.equal(weights[name], stored[name]) for name in stored), model
        assert logits is not None
        assert_logits(logits, str(model))
