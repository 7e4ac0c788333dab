"""`p3o train` on a mixture of experts: experts on both ranks, rollouts from the embedded engine."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_p3o.run_dir import RunDir
from megatron_p3o.trainer.metrics import read_metrics
from tests.integration.commands import p3o, write_run


@pytest.fixture(scope="module")
def tiny_moe_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with four experts a layer, two of them for each token."""
    directory = tmp_path_factory.mktemp("models") / "tiny-moe"
    shutil.copytree(tiny_model_dir, directory)
    fields = AutoConfig.from_pretrained(tiny_model_dir).to_dict()
    for name in ("model_type", "architectures", "dtype", "layer_types"):
        fields.pop(name, None)
    config = Qwen3MoeConfig(
        **fields,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():  # widely spread, so that a wrong expert shows in the log-probs
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(4.0)
    model.save_pretrained(directory)
    return directory


def test_the_engine_follows_experts_that_lie_on_several_ranks(
    tiny_moe_dir: Path, tmp_path: Path
) -> None:
    config = write_run(
        tmp_path,
        tiny_moe_dir,
        layout={"data": 2, "expert": 2},
        train={"steps": 3, "prompts_per_step": 4, "samples_per_prompt": 4},
        checkpoint={"every": 2},
    )
    result = p3o("train", str(config), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    records = read_metrics(RunDir(tmp_path / "run").metrics)
    assert [record["step"] for record in records] == [0, 1, 2]
    for record in records:
        # After each update too, so every expert's weights have reached the engine.
        assert record["mismatch/abs_logprob_mean"] < 1e-5
        assert record["ess/step"] == pytest.approx(1.0, abs=1e-6)
        assert record["router/load_max_over_mean_worst"] > record["router/load_max_over_mean"] > 1
        assert 0 < record["router/entropy_mean"] < 1.387  # log(4)
    assert records[0]["router/entropy_mean"] != records[2]["router/entropy_mean"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layout.expert", "3"], "layout.expert=3 must divide the model's num_experts=4"),
        (["--layout.expert", "4"], "layout.expert=4 x layout.expert_tensor=1 must divide a"),
        (["--layout.tensor", "2"], "layout.sequence_parallel=false must be true"),
    ],
)
def test_layouts_that_experts_do_not_allow(
    words: list[str], message: str, tiny_moe_dir: Path, tmp_path: Path
) -> None:
    result = p3o("train", str(write_run(tmp_path, tiny_moe_dir)), *words, cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
