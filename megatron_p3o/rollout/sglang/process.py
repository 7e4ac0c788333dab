"""One program that is kept under watch: an SGLang server, or a router.

It runs under `megatron_p3o.parent`, in a process group of its own, so that it ends with this
process however that ends, and takes its children with it.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from megatron_p3o.parent import guard_words
from megatron_p3o.rollout.sglang.flags import Command

# Until the guard has asked, waited and ended its group by force.
_STOP_TIMEOUT_S = 10.0
# Killed processes take a moment to give back what they hold.
_DEATH_TIMEOUT_S = 10.0
_POLL_S = 0.05
_SHOWN_BYTES = 2000


class ManagedProcess:
    """Starts a program, and starts it again, until it is stopped."""

    def __init__(self, name: str, command: Callable[[int], Command], log: Path) -> None:
        """
        Args:
            name: for messages, as `server 0`.
            command: what to run, given how often it was started before.
            log: its output is appended to this file, which only its owner can read.
        """
        self.name = name
        self.log = log
        self.num_starts = 0
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False
        self._is_stopped = False
        # A restart that is under way on another thread must not outlive the stop.
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start it, again if need be; what is left of an earlier one is ended first. Nothing
        happens once it was stopped.

        Raises:
            OSError: the program cannot be run.
        """
        with self._lock:
            if not self._is_stopped:
                self._start()

    def _start(self) -> None:
        self.kill()
        command = self._command(self.num_starts)
        self.num_starts += 1
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(self.log, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600), "ab") as log:
            self._process = subprocess.Popen(
                guard_words(list(command.words)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=command.environment,
                start_new_session=True,
            )
        self._is_killed = False

    def exit_status(self) -> str | None:
        """How it ended; None while it runs."""
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            return None
        if code < 0 or code > 128:
            number = -code if code < 0 else code - 128
            with contextlib.suppress(ValueError):
                return f"ended by {signal.Signals(number).name}"
        return f"ended with exit code {code}"

    def last_words(self) -> str:
        """The end of its log, on one line."""
        with contextlib.suppress(OSError):
            text = self.log.read_bytes()[-_SHOWN_BYTES:].decode(errors="replace")
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            return lines[-1] if lines else ""
        return ""

    def stop(self) -> None:
        """Ask it to end, then end it, for good; its ports are free afterwards."""
        self._is_stopped = True
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End it and its children at once, stopped or not."""
        if self._process is None or self._is_killed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + _DEATH_TIMEOUT_S
        while _is_alive(self._process.pid) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._is_killed = True  # the group's number may be another's from here on


def _is_alive(group: int) -> bool:
    """Whether a process group has members that still hold memory and ports."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
