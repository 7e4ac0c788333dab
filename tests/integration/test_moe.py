"""`p3o train` on a mixture of experts: experts on both ranks, rollouts from the embedded engine."""

import json
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


def test_the_rollouts_experts_are_replayed(tiny_moe_dir: Path, tmp_path: Path) -> None:
    fields = {
        "train": {"steps": 2, "prompts_per_step": 4, "samples_per_prompt": 4},
        "model": {"path": str(tiny_moe_dir), "router_replay": True},
    }
    config = write_run(tmp_path, tiny_moe_dir, layout={"data": 2, "expert": 2}, **fields)
    result = p3o("train", str(config), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    run = RunDir(tmp_path / "run")
    generated = read_metrics(run.metrics)
    for record in generated:
        # Of the same weights both routers choose alike, up to ties that rounding decides.
        assert record["router/replay_disagreement"] < 0.01
        assert record["mismatch/abs_logprob_mean"] < 1e-5

    words = ["--rollout.engine", "replay", "--rollout.replay_path", str(run.samples)]
    words += ["--layout.pipeline", "2", "--layout.data", "1", "--layout.expert", "1"]
    result = p3o("train", str(config), *words, "--run.dir", "again", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for got, want in zip(read_metrics(tmp_path / "again/metrics.jsonl"), generated, strict=True):
        for name in ("loss/total", "grad_norm", "ess/step", "entropy/mean"):
            assert got[name] == pytest.approx(want[name], rel=1e-5, abs=1e-7), name

    lines = [json.loads(line) for line in run.samples.read_text().splitlines()]
    lines[5]["routed_experts"] = None
    partial = tmp_path / "partial.jsonl"
    partial.write_text("\n".join(map(json.dumps, lines)))
    words[3] = str(partial)
    result = p3o("train", str(config), *words, "--run.dir", "other", cwd=tmp_path)
    assert result.returncode == 2
    assert "line 6: sample" in result.stderr and "has no routed_experts" in result.stderr
    assert not (tmp_path / "other").exists()


def test_a_dense_model_has_no_experts_to_replay(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = write_run(tmp_path, tiny_model_dir)
    result = p3o("train", str(config), "--model.router_replay", "true", cwd=tmp_path)
    assert result.returncode == 2
    assert "model.router_replay=true replays the choice of experts, but the model has none" in (
        result.stderr
    )


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
