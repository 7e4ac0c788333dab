"""Processes that end with the one that started them, also when that is killed outright.

As a program, this file runs a command (`parent.py PARENT_PID WORD ...`) and ends it, and everything
that it started, when the parent ends or this process is told to. It imports nothing
heavy, so it is there at once and costs little for as long as the command runs.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

SECRET_VARIABLE = "P3O_SECRET"
"""Environment variable with a word that a guarded command must not leave in its output."""
_POLL_S = 0.2
# Between asking and ending by force.
_GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent_pid: int) -> None:
    """Watch from a background thread, and exit within about a second of the parent's end.

    Whatever the main thread does: it may hang, or wait for a process that is gone as well.

    Args:
        parent_pid: of the process that started this one.
    """

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def guard_words(words: list[str]) -> list[str]:
    """The command that runs `words` for as long as this process lives. Start it as the leader of a
    process group (`start_new_session=True`): a signal to the group ends everything."""
    # Isolated: the command inherits the environment, which must not be changed for the guard.
    return [sys.executable, "-I", __file__, str(os.getpid()), *words]


def guard(parent_pid: int, words: list[str]) -> int:
    """Run a command in this process's group; its exit code, or 128 + SIGTERM."""
    asked_to_end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked_to_end.set())
    signal.signal(signal.SIGINT, lambda *_: asked_to_end.set())
    secret = os.environ.get(SECRET_VARIABLE)
    output = subprocess.PIPE if secret else None
    child = subprocess.Popen(words, preexec_fn=_death_signal(), stdout=output, stderr=output)
    for stream, target in ((child.stdout, 1), (child.stderr, 2)):
        if stream is not None and secret:
            copy = threading.Thread(target=_copy, args=(stream, target, secret.encode()))
            copy.daemon = True
            copy.start()
    while child.poll() is None:
        if asked_to_end.wait(_POLL_S) or os.getppid() != parent_pid:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE_S)
            _end_group()
            return 128 + signal.SIGTERM
    _end_group()
    for thread in threading.enumerate():
        if thread.daemon:
            thread.join(_GRACE_S)  # the rest of its output
    code = child.returncode
    return code if code >= 0 else 128 - code


def _copy(source: IO[bytes], target: int, secret: bytes) -> None:
    """Lines from a stream to a file descriptor, with the secret blotted out."""
    for line in source:
        os.write(target, line.replace(secret, b"***"))


def _death_signal() -> Callable[[], None] | None:
    """Has the kernel kill the command when this process is killed. Linux only; elsewhere such a
    death leaves the command running."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return ask


def _end_group() -> None:
    """Kill what the command started and left behind in this process's group."""
    group, me = os.getpgrp(), os.getpid()
    if group != me:  # not the leader: the group holds others
        return
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if entry.isdecimal() and int(entry) != me:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getpgid(int(entry)) == group:
                    os.kill(int(entry), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(guard(int(sys.argv[1]), sys.argv[2:]))
