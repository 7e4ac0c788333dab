r"""Verifiable rewards: built-in verifiers, and a runner that survives whatever a reward does.

A reward function is called as `function(prompt=..., response=..., answer=...)` and returns a
finite number. Built in:

    integer_match      1.0 when the last integer of the response is the answer's, else 0.0
    math_equivalence   1.0 when the response's expression equals the answer's (1/2, 0.5,
                       \frac{1}{2}), else 0.0; by the math-verify library

`integer_match` takes microseconds and runs in place. Everything else runs in one child process
per runner (`reward_worker`): only a process can be stopped when it hangs, and only a process can
die without taking the trainer with it. It is started as a program of its own, not forked: the
parent holds threads and process groups, and importing it again would load the trainer.

Nothing that the child imports may import torch, so that it starts fast.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType

from megatron_p3o.config import RewardSection
from megatron_p3o.data.user_code import check_keywords, import_function
from megatron_p3o.errors import ConfigurationError, RewardError

RewardFunction = Callable[..., float]
"""Called with the keywords `prompt`, `response` and `answer`, all text."""

_EXIT_TIMEOUT_S = 10.0  # after its connection broke, until its exit code is known
_START_TIMEOUT_S = 120.0  # imports of the user's module; a reward's own time starts after them

# A number: sign, digits with optional thousands separators, optional decimals. A minus after a
# digit or a closing bracket subtracts; an ellipsis before a digit is no decimal point.
_NUMBER = re.compile(
    r"(?P<sign>(?<![0-9)\]])[-\u2212])?"
    r"(?:(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.(?P<decimals>[0-9]+))?"
    r"|(?<!\.)\.[0-9]+)"
)
_MATH_DELIMITERS = ("$", "\\(", "\\[", "\\boxed")


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """What a reward is computed from."""

    prompt: str
    response: str
    answer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardResult:
    """A value, or why there is none (one line); exactly one of the two is None."""

    value: float | None = None
    error: str | None = None


def integer_match(prompt: str, response: str, answer: str) -> float:
    """1.0 when the last integer of `response` equals the last one of `answer`, else 0.0.

    Thousands separators and the Unicode minus are understood; 7.0 is the integer 7; 7.5 is no
    integer and holds none.

    Raises:
        ValueError: `answer` has no integer.
    """
    expected = _last_integer(answer)
    if expected is None:
        raise ValueError(f"answer {answer!r} has no integer; use math_equivalence or mend the data")
    return float(_last_integer(response) == expected)


def math_equivalence(prompt: str, response: str, answer: str) -> float:
    """1.0 when the expression in `response` equals `answer` mathematically, else 0.0.

    `answer` is an expression, plain or LaTeX, with or without delimiters. Parsing and comparing
    (math-verify's `parse` and `verify`) have no time limit of their own here: those of the
    library need signals and turn a slow case into a wrong answer without a word.

    Raises:
        ValueError: `answer` cannot be read as an expression.
    """
    from math_verify import parse, verify  # 0.5 s, and only this function needs it

    delimited = any(mark in answer for mark in _MATH_DELIMITERS)
    expected = parse(answer if delimited else f"${answer}$", parsing_timeout=None)
    if not expected:
        raise ValueError(f"answer {answer!r} is no mathematical expression; mend the data")
    found = parse(response, parsing_timeout=None)
    return float(verify(expected, found, timeout_seconds=None))


BUILT_IN: dict[str, RewardFunction] = {
    "integer_match": integer_match,
    "math_equivalence": math_equivalence,
}


def resolve_reward(name: str) -> RewardFunction:
    """The built-in verifier of this name, or the function at `module:function`.

    Raises:
        ConfigurationError: no such verifier, or the function cannot be imported or does not take
            `prompt`, `response` and `answer`.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        raise ConfigurationError(
            f"data.reward.name={name!r} must be one of {list(BUILT_IN)} or an import path "
            "module:function; mend the name"
        )
    function = import_function(name, "data.reward.name")
    check_keywords(function, name, "data.reward.name", ("prompt", "response", "answer"))
    return function


def check_failures(
    num_failed: int, num_total: int, config: RewardSection, first_error: str | None
) -> None:
    """Stop the run when too many of a step's rewards failed.

    Raises:
        RewardError: the failed share exceeds `data.reward.max_failure_fraction`.
    """
    if num_total and num_failed / num_total > config.max_failure_fraction:
        raise RewardError(
            f"{num_failed} of {num_total} rewards by data.reward.name={config.name!r} failed, "
            f"more than data.reward.max_failure_fraction={config.max_failure_fraction} allows; "
            f"the first: {first_error}; mend the reward function, or raise "
            "data.reward.timeout_s or the fraction"
        )


class RewardRunner:
    """Computes rewards one after another; a failure costs its own reward only.

    A reward that raises, returns no finite number, takes longer than `timeout_s`, or ends its
    process gives a `RewardResult` with an error. The child process starts with the first reward
    that needs it, again after it was stopped, and ends with `close()` or with its parent.

    Example:
        with RewardRunner(config.data.reward) as runner:
            results = runner.score([RewardRequest(prompt="3+4?", response="7", answer="7")])
    """

    def __init__(self, config: RewardSection) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def score(self, items: Sequence[RewardRequest]) -> list[RewardResult]:
        """One result per item, in order.

        Raises:
            ConfigurationError: the reward function cannot be imported.
            RewardError: the child process does not start.
        """
        score_one = self._in_place if self._config.name == "integer_match" else self._in_child
        return [score_one(item) for item in items]

    def close(self) -> None:
        """End the child process, and what it started; the next `score` starts another."""
        if self._process is None:
            return
        assert self._connection is not None
        if self._process.poll() is None:
            # The child leads its own process group. SIGKILL: a hung reward may ignore others.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._connection.close()
        self._process = self._connection = None

    def _in_place(self, item: RewardRequest) -> RewardResult:
        try:
            value = integer_match(item.prompt, item.response, item.answer)
        except ValueError as error:
            return RewardResult(error=f"ValueError: {error}")
        return RewardResult(value=value)

    def _in_child(self, item: RewardRequest) -> RewardResult:
        connection = self._connection or self._start()
        try:
            connection.send((item.prompt, item.response, item.answer))
            if not connection.poll(self._config.timeout_s):
                self.close()
                return RewardResult(
                    error=f"TimeoutError: no reward within data.reward.timeout_s="
                    f"{self._config.timeout_s}"
                )
            value, error = connection.recv()
        except (EOFError, ConnectionError):
            return RewardResult(error=f"the reward process ended ({self._exit_status()})")
        return RewardResult(value=value, error=error)

    def _start(self) -> Connection:
        """Start a child and wait until it has imported the reward function."""
        self._connection, child_end = Pipe()
        command = [sys.executable, "-m", "megatron_p3o.data.reward_worker"]
        arguments = [self._config.name, str(child_end.fileno()), str(os.getpid())]
        self._process = subprocess.Popen(
            command + arguments,
            stdin=subprocess.DEVNULL,
            pass_fds=[child_end.fileno()],
            # Ctrl-C is for the trainer, which then closes the child.
            start_new_session=True,
        )
        child_end.close()
        if not self._connection.poll(_START_TIMEOUT_S):
            self.close()
            raise RewardError(
                f"data.reward.name={self._config.name!r}: its process did not start within "
                f"{_START_TIMEOUT_S} s; does importing its module hang?"
            )
        try:
            problem = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise RewardError(
                f"data.reward.name={self._config.name!r}: its process ended at the start "
                f"({self._exit_status()}); its output on stderr says why"
            ) from error
        if problem is not None:
            self.close()
            raise ConfigurationError(problem)
        return self._connection

    def _exit_status(self) -> str:
        """How the child ended, after its connection broke."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "its connection was closed"
        finally:
            self.close()
        return f"signal {-code}" if code < 0 else f"exit code {code}"


def _last_integer(text: str) -> str | None:
    """The last integer in canonical digits ("-0012" -> "-12"); text, as int() limits its length."""
    integers = [
        found
        for found in _NUMBER.finditer(text)
        if found["whole"] and not (found["decimals"] or "").strip("0")
    ]
    if not integers:
        return None
    digits = integers[-1]["whole"].replace(",", "").lstrip("0") or "0"
    return f"-{digits}" if integers[-1]["sign"] and digits != "0" else digits
