"""A sink that can neither stop nor delay a run, whatever the library behind it does.

metrics.jsonl holds every step anyway, so another sink is a convenience. It lives in a thread of its
own: opened, written and closed there, which MLflow needs too, since its active run belongs to a
thread. The rule for failures:

    opening or one step fails   one warning with the remedy; that step is not sent again; the next
                                step tries again, and opens the sink first where that had failed
    3 failures in a row         the sink is switched off for the rest of the run
    256 steps are waiting       the newest step is dropped and counted
    the run ends                60 s are left for what still waits
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import NamedTuple

from megatron_p3o.trainer.metrics import MetricSink

_LOG = logging.getLogger(__name__)
_FAILURES_IN_A_ROW = 3
_WAITING_STEPS = 256
_CLOSE_S = 60.0


class _Step(NamedTuple):
    step: int
    metrics: Mapping[str, float | str]


class _Attempt:
    """A block whose error is kept and not raised, for code of others that may raise anything.

    What is no `Exception`, such as a wish to exit, goes on.
    """

    error: Exception | None = None

    def __enter__(self) -> "_Attempt":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self.error = error if isinstance(error, Exception) else None
        return self.error is not None


class BackgroundSink:
    """Forwards to a sink in another thread, by the rule above."""

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], MetricSink],
        *,
        remedy: str,
        waiting_steps: int = _WAITING_STEPS,
        close_s: float = _CLOSE_S,
    ) -> None:
        """
        Args:
            name: for messages.
            open_sink: makes the sink; called in its thread, at once.
            remedy: what to do when it fails, for the warning.
            waiting_steps: steps that may wait for a slow sink.
            close_s: seconds that `close` waits for them at most.
        """
        self._name, self._open, self._remedy = name, open_sink, remedy
        self._close_s = close_s
        self._steps: queue.Queue[_Step | None] = queue.Queue(waiting_steps)
        self._failures = self._failures_in_a_row = self._dropped = 0
        # A daemon, since a hanging connection must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"{name} sink", daemon=True)
        self._thread.start()

    @property
    def is_off(self) -> bool:
        """Whether too many failures have switched the sink off."""
        return self._failures_in_a_row >= _FAILURES_IN_A_ROW

    @property
    def num_dropped(self) -> int:
        """Steps that found the queue full."""
        return self._dropped

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        if self.is_off:
            return
        try:
            self._steps.put_nowait(_Step(step, dict(metrics)))
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                _LOG.warning(
                    "%s: %d steps wait to be sent, so step %d and others may be dropped; "
                    "metrics.jsonl has every step",
                    self._name,
                    self._steps.maxsize,
                    step,
                )

    def close(self) -> None:
        end = time.monotonic() + self._close_s
        while self._thread.is_alive() and time.monotonic() < end:
            try:
                self._steps.put(None, timeout=0.1)
            except queue.Full:
                continue
            break
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            _LOG.warning(
                "%s: still busy %.0f s after the end of the run and left alone; some steps may be "
                "missing there",
                self._name,
                self._close_s,
            )
        if self._dropped:
            _LOG.warning("%s: %d steps were dropped", self._name, self._dropped)

    def _work(self) -> None:
        """Consumes steps until None comes or the sink is switched off. Runs in the thread."""
        sink = self._try_open()
        while not self.is_off:
            waiting = self._steps.get()
            if waiting is None:
                break
            if sink is None:
                sink = self._try_open()
            if sink is not None:
                with _Attempt() as attempt:
                    sink.write(*waiting)
                self._note(attempt.error, f"step {waiting.step}")
        if sink is not None:
            with _Attempt() as attempt:
                sink.close()
            if attempt.error is not None:
                _LOG.warning("%s: closing failed: %r", self._name, attempt.error)

    def _try_open(self) -> MetricSink | None:
        sink = None
        with _Attempt() as attempt:
            sink = self._open()
        if attempt.error is not None:  # only a written step ends a row of failures
            self._note(attempt.error, "opening")
        return sink

    def _note(self, error: Exception | None, what: str) -> None:
        if error is None:
            self._failures_in_a_row = 0
            return
        self._failures += 1
        self._failures_in_a_row += 1
        if self._failures == 1:
            _LOG.warning(
                "%s: %s failed: %r; training goes on and the next step tries again. %s",
                self._name,
                what,
                error,
                self._remedy,
            )
        if self.is_off:
            _LOG.warning(
                "%s: switched off after %d failures in a row, the last: %r; metrics.jsonl has "
                "every step",
                self._name,
                self._failures_in_a_row,
                error,
            )
