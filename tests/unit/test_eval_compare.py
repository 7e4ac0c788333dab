"""Two evaluations prompt by prompt, by hand and through the command."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_p3o import cli
from megatron_p3o.errors import InputError
from megatron_p3o.evaluation.compare import compare
from megatron_p3o.evaluation.items import EvalItem, read_results, write_results
from megatron_p3o.evaluation.summary import figures

SETTINGS = {"threshold": 0.5, "reward": "integer_match", "temperature": 1.0}
A = [(1, 0, 0, 0), (0, 0, 0, 0), (1, 1, 1, 1), (1, 1, 0, 0)]
B = [(1, 1, 1, 0), (0, 1, 0, 0), (1, 1, 1, 1), (1, 0, 0, 0)]


def items(rewards: Sequence[Sequence[float | None]]) -> list[EvalItem]:
    return [
        EvalItem(
            prompt_id=str(index),
            prompt=f"{index}+{index}=",
            answer=str(2 * index),
            responses=("x",) * len(row),
            rewards=tuple(None if r is None else float(r) for r in row),
            reward_errors=(None,) * len(row),
            lengths=(1,) * len(row),
            finish_reasons=("stop",) * len(row),
        )
        for index, row in enumerate(rewards)
    ]


def write(out: Path, found: Sequence[EvalItem], **settings: object) -> Path:
    summary = figures(found, (1, 2), threshold=0.5, seed=0).to_json()
    write_results(out, found, {"settings": {**SETTINGS, **settings}, **summary})
    return out


def test_differences_by_hand(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", items(A)), write(tmp_path / "b", items(B))
    found = compare(a, b, seed=0)
    reward, at_1, at_2 = found.differences
    assert (reward.a, reward.b) == (7 / 16, 9 / 16)
    assert reward.interval.value == pytest.approx((0.5 + 0.25 + 0 - 0.25) / 4)
    # 8 patterns of 0.5, 0.25, 0.25: |sum| >= 0.5 for 0.5 +- 0.25 -+ 0.25 and +++, with their
    # opposites.
    assert reward.p_value == 6 / 8
    assert (at_1.name, at_1.interval) == ("pass@1", reward.interval)
    # C(n - c, 2) of 6: A 3, 6, 0, 1 and B 0, 3, 0, 3.
    assert (at_2.a, at_2.b) == pytest.approx(((0.5 + 0 + 1 + 5 / 6) / 4, (1 + 0.5 + 1 + 0.5) / 4))
    assert (found.num_wins, found.num_losses, found.num_ties) == (2, 1, 1)
    assert found.sign_test_p_value == 1
    assert [pair.item.prompt_id for pair in found.changed] == ["0", "1", "3"]
    assert found == compare(a, b, seed=0)
    back = compare(b, a, seed=0)
    assert back.differences[0].interval.value == -reward.interval.value


def test_pairing_takes_the_difficulty_of_prompts_out(tmp_path: Path) -> None:
    """B is right once more on every other prompt; between prompts rewards differ far more."""
    before = [(1,) * (index % 9) + (0,) * (10 - index % 9) for index in range(60)]
    after = [
        (1,) * (index % 9 + index % 2) + (0,) * (10 - index % 9 - index % 2) for index in range(60)
    ]
    found = compare(
        write(tmp_path / "a", items(before)), write(tmp_path / "b", items(after)), seed=0
    )
    interval = found.differences[0].interval
    assert interval.low is not None and interval.low > 0.03
    assert found.differences[0].p_value < 0.001 and found.sign_test_p_value < 1e-8
    alone = figures(items(before), (1,), threshold=0.5, seed=0).reward_mean
    assert alone is not None and alone.high is not None
    assert alone.high - alone.value > interval.value  # unpaired, nothing could be said


def test_prompts_of_one_side_and_failed_rewards_are_counted(tmp_path: Path) -> None:
    a = write(tmp_path / "a", items(A))
    b = write(tmp_path / "b", items([(None, None, None, None), *B[1:3]]), temperature=0.5)
    found = compare(a, b, seed=0)
    assert (found.num_pairs, found.num_unpaired, found.num_without_reward) == (3, (1, 0), 1)
    assert found.notes == ["temperature: 1.0 in A, 0.5 in B"]
    assert found.differences[0].a == 0.5  # of prompts 1 and 2
    assert found.differences[1].a == pytest.approx((0.25 + 0 + 1) / 3)  # failed is not correct


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    a = write(tmp_path / "a", items(A))
    first, *rest = items(B)
    for name, other, message in (
        ("prompt", [replace(first, prompt="7+7="), *rest], r"prompt_id 0: its prompt is '0\+0='"),
        ("answer", [replace(first, answer="9"), *rest], "prompt_id 0: its answer is '0'"),
        ("ids", [replace(first, prompt_id="x")], "have no prompt_id in common"),
    ):
        with pytest.raises(InputError, match=message):
            compare(a, write(tmp_path / name, other), seed=0)
    for name, setting in (("threshold", 1.0), ("reward", "math_equivalence")):
        out = write(tmp_path / f"other-{name}", items(B), **{name: setting})
        with pytest.raises(InputError, match=f"--{name} is "):
            compare(a, out, seed=0)
    with pytest.raises(InputError, match="holds no evaluation"):
        compare(a, tmp_path / "nowhere", seed=0)
    damaged = write(tmp_path / "damaged", items(A))
    (damaged / "items.jsonl").write_text('{"prompt_id": "0"')
    with pytest.raises(InputError, match="is damaged"):
        compare(damaged, a, seed=0)


def test_results_survive_their_files(tmp_path: Path) -> None:
    odd = [replace(items([(1, None)])[0], prompt="a\u2028b\n", responses=("\n", "\u00e9"))]
    assert read_results(write(tmp_path / "out", odd))[0] == odd
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # nothing half-written is left


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """`p3o eval` with exit code, stdout and stderr."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["p3o", "eval", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        written = capsys.readouterr()
        return int(ended.value.code or 0), written.out, written.err

    return run


def test_the_command(command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", items(A)), write(tmp_path / "b", items(B))
    code, stdout, _ = command("compare", a, b, "--show", 2)
    assert code == 0
    assert "B wins 2, loses 1, ties 1 (sign test p 1.0000)" in stdout
    assert "+0.1250" in stdout and "changed most: 2 of 3" in stdout
    code, stdout, _ = command("compare", "--json", a, b)
    found = json.loads(stdout)
    assert code == 0 and found["differences"]["reward mean"]["difference"]["value"] == 0.125
    code, _, stderr = command("compare", a, tmp_path / "nowhere")
    assert (code, "holds no evaluation" in stderr) == (2, True)
    assert command("compare", a)[0] == 2
