"""One weight update of several servers, from pause to continue.

    pause (by the interruption mode) -> open -> buckets, the last with the version -> close
      -> [compare checksums] -> continue
    disk: pause -> load the directory -> [compare checksums] -> continue

Servers work side by side, each on a thread, and meet after every bucket, so the sender holds one
bucket. A server that fails is left out of the rest: its weights may be half new, so it is left
paused and reported, and whoever runs the servers restarts it before it serves again. The others go
on.

Interruption modes, for requests that are running when an update comes:

    wait      they end first, under the weights they began with
    retract   they are put back in the queue, and go on under the new weights from their tokens so
              far; the KV cache is computed again
    in_place  they go on with their KV cache of the old weights, which therefore cannot be flushed
              while any runs: start the servers with --disable-radix-cache, or later requests with
              the same prompt reuse the old weights' entries
    abort     they end with the tokens they have

In each mode `meta_info.weight_versions` of a response tells the tokens of each version.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from megatron_p3o.config import Interrupt
from megatron_p3o.rollout.sglang.control import PauseMode, ServerControl
from megatron_p3o.rollout.sglang.errors import CallRefused, ServerError
from megatron_p3o.rollout.sglang.transports import BucketTransport, Target
from megatron_p3o.types import WeightBucket

# With nothing running, any pause will do; this one asks nothing of the requests.
_PAUSE: Mapping[Interrupt, PauseMode] = {
    "wait": "in_place",
    "in_place": "in_place",
    "retract": "retract",
    "abort": "abort",
}

T = TypeVar("T")
Check = Callable[[Target, Sequence[Mapping[str, str]]], str | None]
"""Given a server and its checksums by tensor rank, what is wrong with them, or None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedServer:
    """A server that must not serve again before it has been restarted and updated."""

    url: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishReport:
    """Who holds the version."""

    version: int
    acknowledged: tuple[str, ...]
    """URLs of the servers that serve it."""
    failed: tuple[FailedServer, ...]
    nbytes: int
    """Of the model as it was sent, once."""
    verified: bool
    """Whether the checksums of all acknowledged servers were compared with the trainer's."""

    @property
    def is_complete(self) -> bool:
        return not self.failed


class WeightUpdate:
    """Brings servers to one version. Use from one thread, in the order of the module."""

    def __init__(
        self,
        servers: Sequence[ServerControl],
        version: int,
        *,
        interrupt: Interrupt,
        drain_timeout_s: float,
    ) -> None:
        """
        Args:
            servers: all that should hold the version afterwards.
            version: of the weights to come.
            interrupt: what happens to running requests.
            drain_timeout_s: how long mode `wait` waits for them, seconds.
        """
        self._version = version
        self._interrupt = interrupt
        self._drain_timeout_s = drain_timeout_s
        self._servers = tuple(servers)
        self._targets: dict[str, Target] = {}
        self._failed: dict[str, str] = {}
        self._nbytes = 0
        self._verified = False

    @property
    def targets(self) -> list[Target]:
        """Servers that have not failed."""
        return list(self._targets.values())

    def prepare(self, transport: BucketTransport | None) -> None:
        """Meet the servers, before anything is interrupted."""

        def meet(control: ServerControl) -> Target:
            target = Target(control=control, info=control.info())
            if transport is not None:
                transport.connect(target)
            return target

        self._targets = self._each({c.url: partial(meet, c) for c in self._servers})

    def pause(self) -> None:
        """Stop generating everywhere."""

        def stop(control: ServerControl) -> None:
            if self._interrupt == "wait":
                control.flush_cache(wait_s=self._drain_timeout_s)
            control.pause(_PAUSE[self._interrupt])

        self._with_each(lambda target: stop(target.control))

    def send(self, buckets: Iterable[WeightBucket], transport: BucketTransport) -> None:
        """Open, send every bucket, close. Consumes the buckets even when no server is left."""
        self._with_each(lambda target: _open(target.control))
        for bucket in buckets:
            self._nbytes += len(bucket.data)
            version = str(self._version) if bucket.is_last else None
            flush_cache = bucket.is_last and self._interrupt != "in_place"
            sends = {url: transport.pack(bucket, t) for url, t in self._targets.items()}
            self._each({u: partial(send, flush_cache, version) for u, send in sends.items()})
        self._with_each(lambda target: target.control.end_weight_update())

    def load(self, model_dir: str, nbytes: int) -> None:
        """Have every server read a directory."""
        self._nbytes = nbytes
        flush_cache = self._interrupt != "in_place"
        self._with_each(
            lambda target: target.control.update_from_disk(
                model_dir, flush_cache=flush_cache, version=str(self._version)
            )
        )

    def verify(self, check: Check, *, is_proof: bool) -> None:
        """Compare every server's checksums; a server with other weights has failed.

        Args:
            check: finds what is wrong.
            is_proof: whether finding nothing proves that the weights are the trainer's.
        """
        found = self._with_each(lambda target: target.control.checksums())
        for url, ranks in found.items():
            wrong = check(self._targets[url], ranks)
            if wrong is not None:
                self._fail(url, wrong)
        self._verified = is_proof and bool(self._targets)

    def resume(self) -> None:
        """Go on generating wherever the update succeeded."""

        def go_on(control: ServerControl) -> None:
            if self._interrupt == "in_place":
                with suppress(CallRefused):  # requests are running
                    control.flush_cache()
            control.continue_generation()

        self._with_each(lambda target: go_on(target.control))

    def report(self, transport: BucketTransport | None) -> PublishReport:
        """What became of it; a transport forgets the servers that failed."""
        if transport is not None:
            for control in self._servers:
                if control.url in self._failed:
                    transport.forget(control.url)
        return PublishReport(
            version=self._version,
            acknowledged=tuple(self._targets),
            failed=tuple(FailedServer(url=u, reason=r) for u, r in self._failed.items()),
            nbytes=self._nbytes,
            verified=self._verified,
        )

    def _with_each(self, function: Callable[[Target], T]) -> dict[str, T]:
        return self._each({url: partial(function, t) for url, t in self._targets.items()})

    def _each(self, calls: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """Make one call per server, side by side; answers of those that succeeded."""
        if not calls:
            return {}
        answers = {}
        with ThreadPoolExecutor(len(calls), thread_name_prefix="weight-update") as pool:
            futures = {url: pool.submit(call) for url, call in calls.items()}
            for url, future in futures.items():
                try:
                    answers[url] = future.result()
                except ServerError as error:
                    self._fail(url, str(error))
        return answers

    def _fail(self, url: str, reason: str) -> None:
        self._failed[url] = reason
        self._targets.pop(url, None)


def _open(control: ServerControl) -> None:
    """Begin an update, also where a sender before this one never ended its own."""
    try:
        control.begin_weight_update()
    except CallRefused:
        control.end_weight_update()
        control.begin_weight_update()
