"""SGLang servers on a GPU: how weights get there, and whose log-probs they give.

The servers' interpreter is P3O_SGLANG_VENV's, or that of .venv-sglang: here with a CUDA SGLang.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.integration.commands import p3o
from tests.integration.sglang_servers import save_qwen3
from tests.integration.test_sglang_train import metrics, sglang_run


def model_dir(directory: Path, tiny_model_dir: Path) -> Path:
    """A model that GPU kernels take, with a tokenizer."""
    saved = save_qwen3(directory, seed=0)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(saved)
    return saved


@pytest.mark.parametrize("precision", ["bf16", "fp8-block"])
@pytest.mark.parametrize("transport", ["tensor", "distributed", "disk"])
def test_a_server_takes_weights_and_agrees_with_the_trainer(
    transport: str, precision: str, tmp_path: Path, tiny_model_dir: Path
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("trainer and server need a GPU each")
    config = sglang_run(
        tmp_path,
        model_dir(tmp_path / "model", tiny_model_dir),
        layout={"data": 1},
        train={"steps": 3, "prompts_per_step": 4, "samples_per_prompt": 4},
        sampling={"max_new_tokens": 16},
        precision={"trainer": "bf16", "rollout": precision},
        rollout={
            "max_staleness": 1,
            "launch": {"replicas": 1},
            "publish": {"transport": transport, "verify_every": 1},
            "parity_check": {"max_mean_gap": 0.2},
        },
    )
    result = p3o("train", str(config), cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    found = metrics(tmp_path / "run")
    assert [record["step"] for record in found] == [0, 1, 2]
    assert found[0]["mismatch/abs_logprob_mean"] < (0.05 if precision == "bf16" else 0.2)
    assert all(record["publish/bytes"] > 0 for record in found)
