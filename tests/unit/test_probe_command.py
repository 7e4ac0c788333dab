"""`p3o study probe` as a user types it: words, messages, files."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_p3o import cli
from megatron_p3o.config import to_yaml
from megatron_p3o.errors import ConfigurationError
from megatron_p3o.probe.precisions import DEFAULT_PRECISIONS, parse_precision
from tests.unit.test_probe_measure import run_config

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Exit code, stdout and stderr."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["p3o", "study", "probe", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        written = capsys.readouterr()
        return int(ended.value.code or 0), written.out, written.err

    return run


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "sums.jsonl"
    path.write_text("".join(f'{{"prompt": "{a}+{b}="}}\n' for a in range(3) for b in range(3)))
    return path


def test_everything_is_written(
    probe: Command, tiny_model_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "probe.json"
    words = ("--prompts", prompts, "--no-chat", "--max-new-tokens", 5, "--seed", 7)
    sizes = ("--num-prompts", 4, "--samples", 2, "--ablate", "parts", "--ablate", "layers")
    code, stdout, stderr = probe(tiny_model_dir, *words, *sizes, "--out", out)
    assert code == 0, stderr
    found = json.loads(out.read_text())
    header = stdout.splitlines()[0]
    assert "emulated FP8: rounded numbers, products in fp32; seed 7" in header
    assert "4 prompts x 2 samples" in header
    assert [one["name"] for one in found["precisions"]] == [*DEFAULT_PRECISIONS]
    for one in found["precisions"]:
        assert one["name"] in stdout
        assert one["metrics"].keys() == {
            *("tokens/response", "response/length_mean", "response/truncated_fraction"),
            *("mismatch/k3", "mismatch/abs_logprob_mean", "mismatch/abs_logprob_max"),
            *(f"mismatch/abs_logprob_p{percent}" for percent in (50, 90, 99)),
            *("ess/mismatch", "ratio/mean", "ratio/p01", "ratio/p99", "ratio/max"),
        }  # and no reward: nothing says how to judge
        assert one["standard_errors"].keys() == {
            *("mismatch/k3", "mismatch/abs_logprob_mean", "ess/mismatch", "ratio/mean"),
        }
        assert (
            sum(bucket["tokens"] for bucket in one["positions"])
            == (one["metrics"]["tokens/response"])
        )
    rows = found["ablation"]["rows"]
    assert {row["kind"] for row in rows} == {"full", "parts", "complement", "layers"}
    assert [row["name"] for row in rows if row["kind"] == "full"] == ["everything"]
    for row in rows:
        assert row["name"] in stdout
        assert row["share_of_k3"] >= 0
    assert (found["seed"], found["temperature"], found["max_new_tokens"]) == (7, 1.0, 5)
    assert "\u2026" not in stdout  # no number is cut short


def test_names_of_precisions() -> None:
    section = parse_precision("fp8-tensor:weights@e5m2+kv-e4m3").section
    assert section.rollout == "fp8-tensor"
    assert section.rollout_activations == "unquantized"
    assert (section.rollout_format, section.rollout_kv_cache) == ("e5m2", "fp8_e4m3")
    assert parse_precision("bf16+kv-e5m2").section.rollout_kv_cache == "fp8_e5m2"
    assert [parse_precision(name).name for name in DEFAULT_PRECISIONS] == [*DEFAULT_PRECISIONS]
    for name in ("fp8", "fp8-block+kv-e4m3@e5m2", "bf16:weights", "fp32@e5m2", "fp8-block+kv-e2m1"):
        with pytest.raises(ConfigurationError, match=f"--precision={name}".replace("+", r"\+")):
            parse_precision(name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--precision", "fp8-row"], "--precision=fp8-row must be fp32, bf16, fp8-block"),
        (["--ablate", "heads"], "--ablate=heads must be none, layers or parts"),
        (["--ablate", "none", "--ablate", "parts"], "contradict each other"),
        (["--ablate-precision", "bf16"], "--ablate-precision=bf16 must be one of fp8-block"),
        (["--samples", "0"], "--samples=0 must be >= 1"),
        (["--temperature", "0"], "--temperature=0.0 must be above 0"),
        (["--out", "nowhere/probe.json"], "--out='nowhere/probe.json' must be a file"),
        (["--prompts", "nowhere.jsonl"], "'nowhere.jsonl' does not exist"),
        (["--max-new-tokens", "126"], "has 4 tokens and --max-new-tokens=126 follow"),
        (["--run", "nowhere.yaml"], "'nowhere.yaml' cannot be read"),
        (["--chat"], "data.chat=true needs a tokenizer with a chat template"),
    ],
)
def test_bad_words(
    probe: Command, tiny_model_dir: Path, prompts: Path, words: list[str], message: str
) -> None:
    code, _, stderr = probe(tiny_model_dir, "--prompts", prompts, "--no-chat", *words)
    assert (code, message in stderr) == (2, True), stderr


def test_bad_targets(probe: Command, tiny_model_dir: Path, prompts: Path, tmp_path: Path) -> None:
    empty, run = tmp_path / "empty", tmp_path / "run"
    empty.mkdir()
    run.mkdir()
    config = to_yaml(run_config(tiny_model_dir))
    (run / "config.yaml").write_text(config)
    short = config.replace("max_prompt_tokens: 1024", "max_prompt_tokens: 3")
    (tmp_path / "short.yaml").write_text(short)
    for words, message in (
        ((tmp_path / "none", "--prompts", prompts), "none' does not exist; give a model directory"),
        ((tiny_model_dir,), "says nothing about prompts; add --prompts FILE.jsonl"),
        ((empty, "--prompts", prompts, "--no-chat"), "is no known checkpoint"),
        ((run,), "is a run dir without a complete checkpoint"),
        ((tmp_path / "short.yaml",), "has 4 tokens, but a prompt needs 1 to"),
        ((tmp_path / "short.yaml", "--run", tmp_path / "short.yaml"), "names two runs"),
    ):
        code, _, stderr = probe(*words)
        assert (code, message in stderr) == (2, True), stderr
