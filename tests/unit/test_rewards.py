import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_p3o.config import RewardSection
from megatron_p3o.data.rewards import (
    RewardRequest,
    RewardResult,
    RewardRunner,
    check_failures,
    integer_match,
    math_equivalence,
    resolve_reward,
)
from megatron_p3o.errors import ConfigurationError, RewardError


def request(response: str, answer: str = "", prompt: str = "") -> RewardRequest:
    return RewardRequest(prompt=prompt, response=response, answer=answer)


# --- verifiers


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("7", "7", 1),
        ("3 + 4 = 7", "7", 1),
        ("7 = 3 + 4", "7", 0),
        ("The sum is 7.", "7", 1),
        ("It is ... 7", "7", 1),
        ("It is...7", "7", 1),
        ("$7$", "7", 1),
        ("7cm", "7", 1),
        ("seven", "7", 0),
        ("", "7", 0),
        ("17", "7", 0),
        ("007", "7", 1),
        ("-7", "7", 0),
        ("-7", "-7", 1),
        ("\u22127", "-7", 1),
        ("x=-7", "-7", 1),
        ("(-7)", "-7", 1),
        ("10-7", "7", 1),
        ("f(2)-7", "7", 1),
        ("-0", "0", 1),
        ("1,234", "1234", 1),
        ("1234", "1,234", 1),
        ("1,234,567", "1234567", 1),
        ("-1,234.", "-1234", 1),
        ("1, 2,3", "3", 1),
        ("1,23", "23", 1),
        ("12,3456", "3456", 1),
        ("7.5", "7", 0),
        ("7.5", "5", 0),
        (".5", "5", 0),
        ("7.0", "7", 1),
        ("7, about 3.5 each", "7", 1),
        ("7", "7.0", 1),
        ("42", "it follows that\n#### 42", 1),
        ("9" * 5000, "9" * 5000, 1),
        ("9" * 5000, "9" * 4999, 0),
    ],
)
def test_integer_match(response: str, answer: str, expected: float) -> None:
    assert integer_match(prompt="", response=response, answer=answer) == expected


@settings(deadline=None)
@given(st.integers(), st.integers(), st.sampled_from(["{}", "{:,}", "so {}.", "1 {} = ?"]))
def test_integer_match_is_equality_of_integers(a: int, b: int, text: str) -> None:
    assert integer_match("", text.format(a), str(b)) == float(a == b)
    assert integer_match("", text.format(a), f"{a:,}") == 1.0


def test_integer_match_needs_an_integer_answer() -> None:
    with pytest.raises(ValueError, match=r"answer '1\.5' has no integer"):
        integer_match("", "1", "1.5")


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("0.5", "1/2", 1),
        ("1/2", r"\frac{1}{2}", 1),
        (r"so it is $\frac{1}{2}$", "0.5", 1),
        (r"\boxed{\frac{2}{4}}", r"$\frac{1}{2}$", 1),
        ("0.6", "1/2", 0),
        ("$(x+1)^2$", "x^2+2x+1", 1),
        ("$x^2+2x$", "x^2+2x+1", 0),
        (r"$2\sqrt{2}$", r"\sqrt{8}", 1),
        ("3", r"3\pi", 0),
        ("I do not know", "1/2", 0),
        ("", "1/2", 0),
    ],
)
def test_math_equivalence(response: str, answer: str, expected: float) -> None:
    assert math_equivalence(prompt="", response=response, answer=answer) == expected


def test_math_equivalence_needs_an_expression() -> None:
    with pytest.raises(ValueError, match="answer '' is no mathematical expression"):
        math_equivalence("", "1", "")


# --- the runner

USER_MODULE = """
import os, signal, sys, time

def by_response(prompt, response, answer):
    if response == "hang":
        time.sleep(30)
    if response == "raise":
        raise KeyError("line one\\nline two")
    if response == "exit":
        os._exit(3)
    if response == "sys.exit":
        sys.exit(4)
    if response == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "print":
        print("to stdout")
    if response == "pid":
        return os.getpid()
    return {"nan": float("nan"), "inf": float("inf"), "text": "1.0", "none": None, "true": True,
            "list": [1], "complex": 1j, "huge": 10**400, "half": 0.5}.get(response, len(response))

def echo(prompt, response, answer):
    assert (prompt, answer) == ("asked \\ud800", "42")
    return float(response)

def uses_alarm(prompt, response, answer):
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(0)
    return 1

def spawns(prompt, response, answer):
    import subprocess
    child = subprocess.Popen(["sleep", "60"])
    with open(response, "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    time.sleep(30)

def two_arguments(response, answer):
    return 1.0

loaded = [name for name in ("torch", "transformers", "sympy") if name in sys.modules]
def torch_free(prompt, response, answer):
    return len(loaded)

number = 3
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_rewards.py").write_text(USER_MODULE)
    (tmp_path / "exits_on_import.py").write_text("import os; os._exit(5)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    return "my_rewards"


@pytest.fixture
def runner(user_module: str) -> Iterator[RewardRunner]:
    """Long limit: for functions that answer."""
    with RewardRunner(RewardSection(name=f"{user_module}:by_response", timeout_s=30)) as made:
        yield made


def test_each_failure_costs_its_own_reward_only(runner: RewardRunner) -> None:
    responses = ["abc", "raise", "nan", "inf", "text", "none", "list", "complex", "huge", "true"]
    pid, *results, last = runner.score(
        [request(r) for r in ["pid", *responses, "print", "half", "pid"]]
    )
    assert [result.value for result in results] == [3.0, *[None] * 8, 1.0, 5.0, 0.5]
    rule = "it must be a finite number"
    assert [result.error for result in results[1:9]] == [
        "KeyError: 'line one\\nline two'",
        f"ValueError: the reward is nan; {rule}",
        f"ValueError: the reward is inf; {rule}",
        f"ValueError: the reward is '1.0'; {rule}",
        f"ValueError: the reward is None; {rule}",
        f"ValueError: the reward is [1]; {rule}",
        f"ValueError: the reward is 1j; {rule}",
        "OverflowError: int too large to convert to float",
    ]
    assert pid == last, "none of these ends the process"


def test_ended_process_costs_one_reward(runner: RewardRunner) -> None:
    results = runner.score([request(r) for r in ["exit", "ab", "sys.exit", "kill", "abc"]])
    assert results == [
        RewardResult(error="the reward process ended (exit code 3)"),
        RewardResult(value=2.0),
        RewardResult(error="the reward process ended (exit code 4)"),
        RewardResult(error="the reward process ended (signal 9)"),
        RewardResult(value=3.0),
    ]


def test_hang_costs_one_reward(user_module: str) -> None:
    config = RewardSection(name=f"{user_module}:by_response", timeout_s=1)
    with RewardRunner(config) as runner:
        results = runner.score([request(r) for r in ["a", "hang", "ab"]])
    assert results[0].value == 1.0
    assert results[1].error == "TimeoutError: no reward within data.reward.timeout_s=1.0"
    assert results[2].value == 2.0


def test_stopping_a_hung_reward_stops_what_it_started(user_module: str, tmp_path: Path) -> None:
    config = RewardSection(name=f"{user_module}:spawns", timeout_s=2)
    with RewardRunner(config) as runner:
        (result,) = runner.score([request(str(tmp_path / "pids"))])
    assert result.value is None
    for pid in (tmp_path / "pids").read_text().split():
        wait_until_gone(int(pid))


def test_arguments_reach_the_function_unchanged(user_module: str) -> None:
    with RewardRunner(RewardSection(name=f"{user_module}:echo", timeout_s=30)) as runner:
        assert runner.score([request("2.5", "42", "asked \ud800")]) == [RewardResult(value=2.5)]


@pytest.mark.parametrize(("function", "value"), [("uses_alarm", 1.0), ("torch_free", 0.0)])
def test_the_process_is_light_and_runs_functions_in_its_main_thread(
    user_module: str, function: str, value: float
) -> None:
    with RewardRunner(RewardSection(name=f"{user_module}:{function}", timeout_s=30)) as runner:
        assert runner.score([request("")]) == [RewardResult(value=value)]


def test_close_ends_the_process_and_the_runner_can_go_on(runner: RewardRunner) -> None:
    (first,) = runner.score([request("pid")])
    assert first.value is not None
    runner.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(first.value), 0)
    (second,) = runner.score([request("pid")])
    assert second.value not in (None, first.value)


PARENT_THAT_DIES = """
import os, threading, time
from megatron_p3o.config import RewardSection
from megatron_p3o.data.rewards import RewardRequest, RewardRunner
pid, hang = (RewardRequest(prompt="", response=text, answer="") for text in ("pid", "hang"))
runner = RewardRunner(RewardSection(name="my_rewards:by_response", timeout_s=60))
print(int(runner.score([pid])[0].value), flush=True)
threading.Thread(target=runner.score, args=([hang],)).start()
time.sleep(0.2)
os._exit(0)
"""


def test_hung_process_ends_with_its_parent(user_module: str) -> None:
    output = subprocess.run(
        [sys.executable, "-c", PARENT_THAT_DIES], stdout=subprocess.PIPE, check=True
    ).stdout
    wait_until_gone(int(output))


def wait_until_gone(pid: int) -> None:
    for _ in range(200):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} still runs")


def test_built_in_verifiers_through_the_runner() -> None:
    with RewardRunner(RewardSection(name="integer_match")) as runner:
        items = [request("3+4=7", "7"), request("8", "7"), request("7", "seven")]
        assert [result.value for result in runner.score(items)] == [1.0, 0.0, None]
        assert runner._process is None, "integer_match needs no process"
    with RewardRunner(RewardSection(name="math_equivalence", timeout_s=30)) as runner:
        items = [request("0.5", r"\frac{1}{2}"), request("0.6", "1/2"), request("1", "")]
        results = runner.score(items)
    assert [result.value for result in results] == [1.0, 0.0, None]
    assert results[2].error == "ValueError: answer '' is no mathematical expression; mend the data"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact", r"data.reward.name='exact' must be one of \['integer_match', 'math_equiv"),
        ("no_such_module:f", "module 'no_such_module' cannot be imported"),
        ("my_rewards:other", "has no 'other'"),
        ("my_rewards:number", "cannot be called"),
        ("my_rewards:two_arguments", r"\['prompt', 'response', 'answer'\]: got an unexpected"),
    ],
)
def test_reward_that_cannot_be_resolved(user_module: str, name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve_reward(name)


def test_resolved_user_reward_is_the_function(user_module: str) -> None:
    assert resolve_reward("my_rewards:by_response")(prompt="", response="abcd", answer="") == 4
    assert resolve_reward("integer_match") is integer_match


def test_process_that_cannot_start(user_module: str) -> None:
    with (
        RewardRunner(RewardSection(name="my_rewards:other")) as runner,
        pytest.raises(ConfigurationError, match="has no 'other'"),
    ):
        runner.score([request("")])
    with (
        RewardRunner(RewardSection(name="exits_on_import:f")) as runner,
        pytest.raises(RewardError, match=r"ended at the start \(exit code 5\)"),
    ):
        runner.score([request("")])


# --- tolerance


def test_failures_up_to_the_fraction_are_tolerated() -> None:
    config = RewardSection(name="integer_match", max_failure_fraction=0.1)
    check_failures(0, 0, config, None)
    check_failures(1, 10, config, "KeyError: 'x'")
    check_failures(3, 30, config, "KeyError: 'x'")
    with pytest.raises(RewardError, match=r"2 of 10 rewards .*=0\.1 allows; the first: KeyError"):
        check_failures(2, 10, config, "KeyError: 'x'")
    with pytest.raises(RewardError, match="1 of 1000 "):
        check_failures(1, 1000, RewardSection(max_failure_fraction=0), "E")
    check_failures(5, 5, RewardSection(max_failure_fraction=1), "E")
