"""p3o samples: which samples are chosen, and that they are shown as they are."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from megatron_p3o.cli import app
from megatron_p3o.errors import InputError, UserError
from megatron_p3o.inspect_run.pieces import pieces, read_tokenizer
from megatron_p3o.inspect_run.samples import Order, choose, read_step
from megatron_p3o.inspect_run.show import show

SAMPLE = {
    "advantage": 0.7071,
    "prompt_id": "0-7",
    "sample_index": 0,
    "prompt_ids": [1, 4],
    "response_ids": [0, 1, 2],
    "rollout_logprobs": [-0.01, -3.0, -6.0],
    "finish_reason": "stop",
    "weight_version_min": 6,
    "weight_version_max": 6,
    "prompt_text": "1+1=",
    "response_text": "a b",
    "reward": 1.0,
    "reward_error": None,
    "routed_experts": None,
    "version_spans": [],
}


def line(step: int = 0, **changes: Any) -> str:
    return json.dumps({"step": step, **SAMPLE, **changes}) + "\n"


def write(root: Path, *texts: str) -> Path:
    root.mkdir(exist_ok=True)
    (root / "samples.jsonl").write_text("".join(texts))
    return root


def shown(*words: str) -> str:
    result = CliRunner().invoke(app, ["samples", *words])
    assert result.exit_code == 0, result.output
    return result.output


def byte_tokenizer() -> Tokenizer:
    """One token for each byte, ids as in GPT-2's alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize(
    ("order", "names"),
    [
        (Order.RECORDED, ["a/0", "b/0", "c/0", "d/0", "e/0"]),
        (Order.WORST, ["b/0", "d/0", "c/0", "a/0", "e/0"]),
        (Order.BEST, ["a/0", "c/0", "b/0", "d/0", "e/0"]),
    ],
)
def test_samples_go_by_reward_and_ties_as_recorded(
    tmp_path: Path, order: Order, names: list[str]
) -> None:
    rewards = {"a": 1.0, "b": 0.0, "c": 0.5, "d": 0.0, "e": None}
    root = write(tmp_path, *(line(prompt_id=name, reward=r) for name, r in rewards.items()))
    samples = read_step(root / "samples.jsonl", None)
    assert [s.name for s in choose(samples, order, only_flagged=False, limit=9)] == names
    assert [s.name for s in choose(samples, order, only_flagged=False, limit=2)] == names[:2]
    assert [s.name for s in choose(samples, order, only_flagged=True, limit=2)] == ["e/0"]


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({}, []),
        ({"rollout_logprobs": [0.0, -15.0, -1.0]}, []),
        ({"reward": None, "reward_error": "timed out"}, ["reward failed: timed out"]),
        ({"finish_reason": "length"}, ["truncated"]),
        (
            {"rollout_logprobs": [-1.0, -16.0, -20.0]},
            ["2 tokens of extreme log-prob: -20.0 at 2"],
        ),
        ({"rollout_logprobs": [0.5, -1.0, -1.0]}, ["1 tokens of extreme log-prob: 0.5 at 0"]),
        (
            {"rollout_logprobs": [-math.inf, -1.0, math.nan]},
            ["2 tokens of extreme log-prob: nan at 2"],
        ),
    ],
)
def test_flags_say_what_may_be_wrong(
    tmp_path: Path, changes: dict[str, Any], flags: list[str]
) -> None:
    (sample,) = read_step(write(tmp_path, line(**changes)) / "samples.jsonl", 0)
    assert sample.flags() == flags


def test_the_last_step_is_shown_unless_another_is_asked_for(tmp_path: Path) -> None:
    root = write(tmp_path, line(2, prompt_id="x"), line(3, prompt_id="y"), '{"step": 4, "adv')
    assert "step 3: 1 of 1 samples" in shown(str(root))
    assert "--- x/0" in shown(str(root), "--step", "2")


def test_a_sample_is_shown_with_its_numbers(tmp_path: Path) -> None:
    changes = {"weight_version_max": 7, "version_spans": [[6, 0, 2], [7, 2, 3]]}
    output = shown(str(write(tmp_path, line(**changes))))
    assert (
        "reward 1  advantage 0.707  3 tokens  finish stop  weight version 6 to 7 "
        "(6 from token 0, 7 from token 2)" in output
    )
    assert "least likely (nats)  #2 -6.00, #1 -3.00, #0 -0.01" in output
    assert "No tokens are coloured" in output


def test_markup_and_control_sequences_stay_text(tmp_path: Path) -> None:
    root = write(tmp_path, line(response_text="[bold]x[/bold]\x1b[2J", prompt_text="[/red]\n:cat:"))
    output = shown(str(root))
    assert "[bold]x[/bold]\\x1b[2J" in output
    assert "  [/red]\n  :cat:" in output
    assert "\x1b" not in output


def test_unlikely_tokens_are_coloured(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    ids = [tokenizer.token_to_id(token) for token in "abc"]
    (sample,) = read_step(write(tmp_path, line(response_ids=ids)) / "samples.jsonl", 0)
    text = show(sample, tokenizer)
    styles = {text.plain[s.start : s.end]: str(s.style) for s in text.spans}
    assert (styles["b"], styles["c"], "a" in styles) == ("yellow", "bold red", False)
    assert "least likely (nats)  #2 'c' -6.00, #1 'b' -3.00, #0 'a' -0.01" in text.plain


def test_tokens_of_one_character_are_one_piece() -> None:
    tokenizer = byte_tokenizer()
    text = "a \u00fc\u4e2d"
    ids = tokenizer.encode(text).ids
    assert pieces(tokenizer, ids) == [
        ("a", 0, 1),
        (" ", 1, 2),
        ("\u00fc", 2, 4),
        ("\u4e2d", 4, 7),
    ]
    assert pieces(tokenizer, ids[2:3]) == [("\ufffd", 0, 1)]  # cut in the middle


def test_a_space_at_the_start_of_a_token_is_kept() -> None:
    """Llama's decoder drops the first space of a text, not that of every token."""
    tokenizer = Tokenizer(models.WordLevel({"\u2581one": 0, "\u2581two": 1}, "\u2581one"))
    tokenizer.decoder = decoders.Metaspace()
    assert pieces(tokenizer, [0, 1]) == [("one", 0, 1), (" two", 1, 2)]


def test_the_tokenizer_of_the_run_is_used_where_it_is(tmp_path: Path) -> None:
    assert read_tokenizer(tmp_path / "config.yaml") is None
    (tmp_path / "config.yaml").write_text(f"model:\n  path: {tmp_path}\n")
    assert read_tokenizer(tmp_path / "config.yaml") is None
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    ids = byte_tokenizer().encode("xyz").ids
    output = shown(str(write(tmp_path, line(response_ids=ids))))
    assert "  xyz\n" in output
    assert "below 1 % or below 10 % are coloured" in output


@pytest.mark.parametrize(
    ("texts", "step", "message"),
    [
        ([line(), "{]\n", line()], None, "line 2: not a JSON object with a step"),
        ([line(), '{"step": 0, "x"\n'], None, "line 2: not JSON"),
        ([line(), '{"step": 0, "x": 1}\n'], None, r"line 2: not a recorded sample \(KeyError"),
        ([line(rollout_logprobs=[-1.0])], None, "line 1: 3 response_ids but 1 rollout_logprobs"),
        ([line(1), line(4)], 3, "--step 3 is not in .* 2 steps from 1 to 4; choose one"),
        ([], None, "holds no samples yet"),
    ],
)
def test_bad_files_are_named_with_the_line(
    tmp_path: Path, texts: list[str], step: int | None, message: str
) -> None:
    root = write(tmp_path, *texts)
    with pytest.raises(InputError, match=message):
        read_step(root / "samples.jsonl", step)


def test_a_missing_file_and_two_orders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"run\.record=true"):
        read_step(tmp_path / "samples.jsonl", None)
    result = CliRunner().invoke(app, ["samples", str(tmp_path), "--worst", "--best"])
    assert isinstance(result.exception, UserError)


def test_a_sample_prints_on_any_console(tmp_path: Path) -> None:
    """Lone surrogates, which JSON can hold, have no UTF-8."""
    (sample,) = read_step(write(tmp_path, line(response_text="\ud83d")) / "samples.jsonl", None)
    with (tmp_path / "out").open("w", encoding="utf-8") as file:
        Console(file=file).print(show(sample, None))
    assert "\\ud83d" in (tmp_path / "out").read_text()
