"""Which servers may serve, and who gets the next free place on one.

A server serves while it is up and holds the version that was published last. A sample is generated
on the server with the fewest samples in flight; when none has a free place, samples wait in the
order in which they came. Everything here lives on one event loop.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_p3o.config import RolloutSection
from megatron_p3o.errors import RunError, UserError
from megatron_p3o.rollout.sglang.client import GenerateClient
from megatron_p3o.rollout.sglang.control import ServerControl
from megatron_p3o.rollout.sglang.errors import ServerError, ServerUnreachable, WrongWeights
from megatron_p3o.rollout.sglang.process import ManagedProcess
from megatron_p3o.rollout.sglang.supervisor import Health, Server, Supervisor, describe
from megatron_p3o.rollout.sglang.update import PublishReport

# Failed requests in a row, from a server that answers its probes, until it is taken out.
_MAX_FAILURES = 3
# Before weights are sent again to somebody else's server that failed to take them.
_UPDATE_RETRY_S = 10.0

_log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Place:
    """A server as the fleet sees it."""

    server: Server
    control: ServerControl
    version: int | None = None
    """That it acknowledged; None: its weights are not the trainer's."""
    incarnation: int = 0
    in_flight: int = 0
    num_failures: int = 0
    """In a row."""
    not_before: float = 0.0
    """When weights may be sent to it again."""
    has_refused: bool = False
    """Whether it failed to take weights since it last did, or since it was started."""
    deadlines: set[asyncio.Timeout] = field(default_factory=set)
    """Of the requests it is working on."""

    @property
    def url(self) -> str:
        return self.server.url


class Fleet:
    """Servers, their versions, and a queue for their places."""

    def __init__(
        self,
        servers: Sequence[Server],
        client: GenerateClient,
        rollout: RolloutSection,
        *,
        api_key: str | None,
        on_event: Callable[[], None],
        router: tuple[str, ManagedProcess | None] | None = None,
        patience_s: float | None = None,
    ) -> None:
        """
        Args:
            servers: all of them.
            client: of the same loop.
            rollout: limits and deadlines.
            api_key: for control calls.
            on_event: told, on the loop, when a server needs weights or nothing can serve any more.
            router: its URL, and its process if it is ours.
            patience_s: how long a server may be silent; None: `rollout.probe_timeout_s`.
        """
        self.version: int | None = None
        """Published last; None before the first publication."""
        self.newest_version: int | None = None
        """Of all that were sent, the one in progress included."""
        self.busy_s = 0.0
        """Time with at least one sample in flight."""
        self.num_failures = 0
        self._client = client
        self._rollout = rollout
        self._on_event = on_event
        self._supervisor = Supervisor(
            servers,
            client,
            rollout,
            patience_s=patience_s or rollout.probe_timeout_s,
            on_change=self._changed,
        )
        self._places = {
            server.url: Place(
                server=server,
                control=ServerControl(
                    server.url,
                    call_timeout_s=min(60.0, rollout.publish.timeout_s),
                    update_timeout_s=rollout.publish.timeout_s,
                    api_key=api_key,
                ),
            )
            for server in servers
        }
        self._router = None if router is None else router[0]
        self._router_process = None if router is None else router[1]
        self._router_is_up = False
        self._waiting: deque[asyncio.Future[Place]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight = 0
        self._busy_since = 0.0
        self._idle_since: float | None = time.monotonic()
        """Since when no server serves or is about to."""

    async def start(self) -> None:
        await self._supervisor.start()
        if self._router is not None:
            self._spawn(self._watch_router(self._router))

    async def close(self) -> None:
        """End what was started; nobody may be waiting for a place any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._router_process is not None:
            await asyncio.to_thread(self._router_process.stop)
        await self._supervisor.close()

    # Places

    async def acquire(self) -> Place:
        """A place on a server; `release` it."""
        place = self._best() if not self._waiting else None
        if place is None:
            turn: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                place = await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.release(turn.result())
                raise
        else:
            self._occupy(place)
        return place

    def release(self, place: Place) -> None:
        place.in_flight -= 1
        self._in_flight -= 1
        if not self._in_flight:
            self.busy_s += time.monotonic() - self._busy_since
        self._hand_out()

    def entry(self, place: Place) -> str:
        """Where a request goes: to the router, while it and all servers serve, else straight to
        the place's server."""
        all_serve = self.num_serving == len(self._places)
        return self._router if self._router and self._router_is_up and all_serve else place.url

    def note_success(self, place: Place) -> None:
        place.num_failures = 0

    def note_failure(self, place: Place, url: str, error: ServerError) -> None:
        """A request failed there; decides whether the server stays in."""
        self.num_failures += 1
        place.num_failures += 1
        # One line for what happened to a server, not one for each of its samples.
        is_known = place.num_failures > 1 or place.server.health is not Health.UP
        level = logging.DEBUG if is_known else logging.WARNING
        _log.log(level, "samples fail and are tried again: %s", describe(error))
        if url == self._router:
            self._router_is_up = False
            return
        if isinstance(error, WrongWeights):
            place.version = None
            self._changed(place.server)
            return
        if isinstance(error, ServerUnreachable):
            place.server.suspect()
        elif place.num_failures >= _MAX_FAILURES and place.server.health is Health.UP:
            place.version = None
            place.not_before = time.monotonic() + _UPDATE_RETRY_S
            reason = f"failed {place.num_failures} requests in a row"
            place.num_failures = 0
            self._spawn(self._supervisor.replace(place.server, reason))

    # Versions

    @property
    def is_updating(self) -> bool:
        return any(place.server.is_busy_updating for place in self._places.values())

    @property
    def is_starting(self) -> bool:
        return any(place.server.health is Health.STARTING for place in self._places.values())

    @property
    def num_serving(self) -> int:
        return sum(map(self._serves, self._places.values()))

    @property
    def num_restarts(self) -> int:
        return self._supervisor.num_restarts

    def serving_urls(self) -> list[str]:
        return [place.url for place in self._places.values() if self._serves(place)]

    def busy_until_now(self) -> float:
        """Seconds with at least one sample in flight."""
        return self.busy_s + (time.monotonic() - self._busy_since if self._in_flight else 0.0)

    def in_need(self) -> list[Place]:
        """Servers that are up and lack the published version."""
        now = time.monotonic()
        return [
            place
            for place in self._places.values()
            if place.server.health is Health.UP
            and not place.server.is_busy_updating
            and (place.version is None or place.version != self.version)
            and place.not_before <= now
        ]

    def begin_update(self, version: int, *, only_in_need: bool) -> list[ServerControl]:
        """Hold back new samples from the servers that are to get weights.

        Returns:
            The servers to update; with `only_in_need` those that lack the published version, else
            all that answer.
        """
        chosen = self.in_need()
        if not only_in_need:
            answering = (Health.UP, Health.SUSPECT)
            chosen = [p for p in self._places.values() if p.server.health in answering]
        self.newest_version = version
        for place in chosen:
            place.server.is_busy_updating = True
            place.incarnation = place.server.incarnation
        return [place.control for place in chosen]

    def end_update(self, report: PublishReport | None, version: int) -> None:
        """Let the servers that took the version serve, and replace the others."""
        self.version = version
        acknowledged = () if report is None else report.acknowledged
        failed = {} if report is None else {f.url: f.reason for f in report.failed}
        for place in self._places.values():
            if not place.server.is_busy_updating:
                continue
            place.server.is_busy_updating = False
            # A process that came up meanwhile holds nothing.
            is_same = place.incarnation == place.server.incarnation
            place.version = version if place.url in acknowledged and is_same else None
            place.has_refused = place.url in failed
            if place.has_refused:
                place.not_before = time.monotonic() + _UPDATE_RETRY_S
                reason = f"did not take weight version {version}: {failed[place.url]}"
                self._spawn(self._supervisor.replace(place.server, reason))
            place.server.wake.set()
        self._hand_out()

    # Trouble

    @property
    def fatal(self) -> RunError | UserError | None:
        """Why these servers can never serve."""
        return self._supervisor.fatal

    def problem(self) -> RunError | UserError | None:
        """Why the run cannot go on, if it cannot."""
        if self.fatal is not None:
            return self.fatal
        healths = {place.url: place.server.health for place in self._places.values()}
        if all(health is Health.GIVEN_UP for health in healths.values()):
            return RunError(
                f"all {len(healths)} rollout servers are given up after "
                f"rollout.launch.max_restarts={self._rollout.launch.max_restarts} restarts each; "
                "their logs in run.dir/servers say why. The last checkpoint is valid: continue "
                "with --resume"
            )
        self._note_idleness()
        limit_s = self._rollout.outage_timeout_s
        if Health.STARTING in healths.values() and self.version is None:
            limit_s = max(limit_s, self._rollout.launch.start_timeout_s)
        if self._idle_since is None or time.monotonic() - self._idle_since < limit_s:
            return None
        states = ", ".join(f"{url} {health.name.lower()}" for url, health in healths.items())
        return RunError(
            f"no rollout server could serve for rollout.outage_timeout_s={limit_s:g} s ({states}); "
            "see to the servers. The last checkpoint is valid: continue with --resume"
        )

    def _note_idleness(self) -> None:
        # A server that refuses its weights again and again is no hope.
        is_hopeful = any(not place.has_refused for place in self.in_need())
        if self.num_serving or is_hopeful:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.monotonic()

    # Inside

    def _changed(self, server: Server) -> None:
        place = self._places[server.url]
        if place.incarnation != server.incarnation and not server.is_busy_updating:
            place.incarnation, place.version = server.incarnation, None
            place.has_refused = False
        if server.health in (Health.STARTING, Health.DOWN, Health.GIVEN_UP):
            place.version = None if server.process is not None else place.version
            now = asyncio.get_running_loop().time()
            for deadline in tuple(place.deadlines):
                deadline.reschedule(now)  # its samples are tried again elsewhere
        self._note_idleness()
        if self.in_need() or self.problem() is not None:
            self._on_event()
        self._hand_out()

    def _serves(self, place: Place) -> bool:
        return (
            place.server.health is Health.UP
            and not place.server.is_busy_updating
            and place.version is not None
            and place.version == self.version
        )

    def _best(self) -> Place | None:
        """The serving place with the fewest samples in flight, if one is free."""
        free = [
            place
            for place in self._places.values()
            if place.in_flight < self._rollout.concurrency and self._serves(place)
        ]
        return min(free, key=lambda place: place.in_flight, default=None)

    def _occupy(self, place: Place) -> None:
        place.in_flight += 1
        if not self._in_flight:
            self._busy_since = time.monotonic()
        self._in_flight += 1

    def _hand_out(self) -> None:
        while self._waiting:
            if self._waiting[0].done():  # cancelled
                self._waiting.popleft()
                continue
            place = self._best()
            if place is None:
                return
            self._occupy(place)
            self._waiting.popleft().set_result(place)

    async def _watch_router(self, url: str) -> None:
        """Consumes the router's health; waits for the probe interval; produces whether requests
        go through it, and a new process where ours ended."""
        process = self._router_process
        has_been_up = False
        while True:
            ended = process.exit_status() if process is not None and process.num_starts else None
            if process is not None and (ended is not None or not process.num_starts):
                self._router_is_up = False
                if ended is not None:
                    _log.warning("the router at %s %s; it is restarted", url, ended)
                # It asks its servers for their models, so they must be there first.
                if all(p.server.health is Health.UP for p in self._places.values()):
                    await asyncio.to_thread(process.start)
            is_up = await self._router_answers(url)
            if is_up != self._router_is_up:
                state = "serves" if is_up else "does not answer; samples go straight to the servers"
                if is_up or has_been_up:
                    _log.log(logging.INFO if is_up else logging.WARNING, "router %s %s", url, state)
            self._router_is_up = is_up
            has_been_up = has_been_up or is_up
            await asyncio.sleep(min(self._rollout.probe_every_s, 1.0))

    async def _router_answers(self, url: str) -> bool:
        try:
            async with asyncio.timeout(self._rollout.probe_timeout_s):
                return await self._client.is_healthy(url)
        except TimeoutError:
            return False

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
