"""Bad input: exit 2, one message with field, value, rule and remedy, nothing written."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.commands import p3o, write_run


def refuse(directory: Path, config: Path, *words: str) -> str:
    """The message of a run that must be refused before anything is written."""
    before = sorted(directory.rglob("*"))
    result = p3o("train", str(config), *words, cwd=directory)
    assert result.returncode == 2, (result.returncode, result.stderr)
    assert result.stderr.startswith("p3o: ")
    assert "Traceback" not in result.stderr
    assert "elastic" not in result.stderr
    assert result.stdout == ""
    assert sorted(directory.rglob("*")) == before
    return result.stderr


SERVERS = ("--rollout.engine", "sglang", "--rollout.launch.replicas", "1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--train.stepz", "3"], "train.stepz=3: no such field"),
        (["--train.steps", "many"], "train.steps='many': Input should be a valid integer"),
        (["--layout.tensor", "3"], "layout.tensor=3 must divide"),
        (["--layout.pipeline", "3"], "layout.pipeline=3 must divide"),
        (["--layout.sequence_parallel", "true"], "needs layout.tensor >= 2 (got 1)"),
        (["--layout.virtual_pipeline", "2"], "layout.virtual_pipeline=2 needs layout.pipeline"),
        (["--layout.expert", "2"], "layout.expert=2 shares experts, but the model has none"),
        (["--model.moe_aux_loss_coefficient", "0.1"], "balances experts, but the model has none"),
        (["--sampling.top_p", "0.9"], "training needs top_p=1"),
        (["--sampling.top_k", "50"], "training needs top_p=1"),
        (["--train.samples_per_prompt", "1"], "train.samples_per_prompt=1 must be >= 2"),
        (["--model.path", "nowhere"], "no such directory"),
        (["--data.reward.name", "nowhere:reward"], "nowhere"),
        (["--data.reward.name", "perfect"], "perfect"),
        (["--data.source", "jsonl"], "data.path is needed by data.source=jsonl"),
        (["--rollout.engine", "replay"], "rollout.replay_path=None goes with"),
        (["--rollout.engine", "sglang"], "rollout.engine=sglang has no servers"),
        (
            [*SERVERS, "--rollout.launch.python", "/no/python"],
            "rollout.launch.python='/no/python' is no program",
        ),
        (
            [*SERVERS, "--rollout.api_key_env", "P3O_NOT_SET"],
            "rollout.api_key_env='P3O_NOT_SET' names an environment variable",
        ),
        (["--train.steps"], "override --train.steps needs a value"),
    ],
)
def test_configuration(
    words: list[str], message: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    assert message in refuse(tmp_path, write_run(tmp_path, tiny_model_dir), *words)


def test_prompt_files(tiny_model_dir: Path, tmp_path: Path) -> None:
    data = {"source": "jsonl", "generator": None, "path": "prompts.jsonl"}
    config = write_run(tmp_path, tiny_model_dir, data=data)
    prompts = tmp_path / "prompts.jsonl"
    assert "prompts.jsonl" in refuse(tmp_path, config)
    prompts.write_text("")
    assert "has no prompts" in refuse(tmp_path, config)
    prompts.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": \n')
    assert "line 2" in refuse(tmp_path, config)
    prompts.write_text('{"prompt": "1+1="}\n')
    assert "answer" in refuse(tmp_path, config)


def cut_weights(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def remove_config(model: Path) -> None:
    (model / "config.json").unlink()


def remove_tokenizer(model: Path) -> None:
    for file in model.glob("tokenizer*"):
        file.unlink()


def another_architecture(model: Path) -> None:
    config = model / "config.json"
    config.write_text(config.read_text().replace("Qwen3ForCausalLM", "GPT2LMHeadModel"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_weights, "model.safetensors"),
        (remove_config, "config.json"),
        (remove_tokenizer, "tokenizer"),
        (another_architecture, "GPT2LMHeadModel"),
    ],
)
def test_model_directories(
    damage: Callable[[Path], None], message: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    damage(model)
    assert message in refuse(tmp_path, write_run(tmp_path, model))


def test_run_dirs_and_resuming(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = write_run(
        tmp_path, tiny_model_dir, train={"steps": 1, "prompts_per_step": 2}, checkpoint={"every": 1}
    )
    assert "does not exist" in refuse(tmp_path, config, "--resume")
    result = p3o("train", str(config), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "already exists; add --resume" in refuse(tmp_path, config)
    more = ["--resume", "--train.steps", "2"]
    assert "run.seed differs" in refuse(tmp_path, config, *more, "--run.seed", "4")
    template = ["--data.generator_args", "{max_operand: 1, template: '{a}{op}{b}='}"]
    assert "data differs" in refuse(tmp_path, config, *more, *template)
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    changed = ["--model.path", str(model)]
    assert "model.path differs" in refuse(tmp_path, config, *more, *changed)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert "no complete checkpoint" in refuse(tmp_path, config, *more)


def test_ranks_that_do_not_form_the_layout(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = write_run(tmp_path, tiny_model_dir)
    started_by_torchrun = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    result = p3o("train", str(config), cwd=tmp_path, env=started_by_torchrun)
    assert result.returncode == 2
    assert "layout needs 2 ranks" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_missing_run_file(tmp_path: Path) -> None:
    assert "'nothing.yaml' cannot be read" in refuse(
        tmp_path, tmp_path.relative_to(tmp_path) / "nothing.yaml"
    )
