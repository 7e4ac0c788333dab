"""Keeps servers alive: watches their processes and their answers, and restarts those it started.

    STARTING --answers--> UP --probe or request fails--> SUSPECT --answers--> UP
        ^                                                   |
        |              process ended, or silent too long    v
        +--------------------- restarted (ours) <---------- DOWN (others': until it answers)

A server that answers as another process than before has lost its weights: `incarnation` rises, and
whoever hands out weights must see to it before it serves. Everything here lives on one event loop.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from megatron_p3o.config import RolloutSection
from megatron_p3o.errors import ConfigurationError, RunError, UserError
from megatron_p3o.rollout.sglang.client import GenerateClient
from megatron_p3o.rollout.sglang.control import ServerInfo
from megatron_p3o.rollout.sglang.errors import CallRefused, ServerError
from megatron_p3o.rollout.sglang.process import ManagedProcess
from megatron_p3o.tested_versions import SGLANG as TESTED_VERSIONS

# While a server starts or is suspect, it is looked at more often than a healthy one.
_QUICK_PROBE_S = 0.5
_MAX_BACKOFF_S = 60.0

_log = logging.getLogger(__name__)


class Health(Enum):
    STARTING = auto()
    UP = auto()
    SUSPECT = auto()
    """Something failed; no new requests until it answers a probe."""
    DOWN = auto()
    """Gone, and not ours to restart; it may come back."""
    GIVEN_UP = auto()
    """Restarted too often."""


@dataclass(kw_only=True, eq=False)
class Server:
    """What is known of one server."""

    url: str
    process: ManagedProcess | None = None
    """None for one that somebody else runs."""
    health: Health = Health.STARTING
    info: ServerInfo | None = None
    incarnation: int = 0
    """Rises with every process that answers at this URL."""
    is_busy_updating: bool = False
    """Its scheduler takes weights and answers no probes."""
    num_restarts: int = 0
    silent_since: float | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to have it looked at at once."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while its state is decided."""

    def suspect(self) -> None:
        """Take it out until it answers a probe."""
        if self.health is Health.UP:
            self.health = Health.SUSPECT
        self.wake.set()


class Supervisor:
    """Watches servers until it is closed."""

    def __init__(
        self,
        servers: Sequence[Server],
        client: GenerateClient,
        rollout: RolloutSection,
        *,
        patience_s: float,
        on_change: Callable[[Server], None],
    ) -> None:
        """
        Args:
            servers: to be watched; processes of ours are started by `start`.
            client: for probes.
            rollout: intervals and limits.
            patience_s: how long a server that has started may be silent.
            on_change: told, on the loop, whenever a server's health or incarnation changed.
        """
        self.servers = tuple(servers)
        self.num_restarts = 0
        self.fatal: RunError | UserError | None = None
        """Why the servers can never serve this run."""
        self._client = client
        self._rollout = rollout
        self._patience_s = patience_s
        self._on_change = on_change
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the processes, and watching."""
        for server in self.servers:
            if server.process is not None:
                _log.info("%s starts at %s", server.process.name, server.url)
                await self._start(server.process)
            server.silent_since = time.monotonic()
            task = asyncio.create_task(self._watch(server))
            task.add_done_callback(self._stop_if_failed)
            self._tasks.append(task)

    async def close(self) -> None:
        """Stop watching, and end the processes that were started."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        processes = [s.process for s in self.servers if s.process is not None]
        await asyncio.gather(*(asyncio.to_thread(process.stop) for process in processes))

    async def _watch(self, server: Server) -> None:
        """Consumes exits and probe answers of one server; waits for the probe interval or for
        `server.wake`; produces its health, and a new process where the old one is lost."""
        while server.health is not Health.GIVEN_UP and self.fatal is None:
            before = (server.health, server.incarnation)
            async with server.lock:
                await self._look_at(server)
            if before != (server.health, server.incarnation) or self.fatal is not None:
                self._on_change(server)
            is_calm = server.health in (Health.UP, Health.DOWN)
            wait_s = self._rollout.probe_every_s if is_calm else _QUICK_PROBE_S
            try:
                async with asyncio.timeout(min(wait_s, self._rollout.probe_every_s)):
                    await server.wake.wait()
            except TimeoutError:
                pass
            server.wake.clear()

    async def _look_at(self, server: Server) -> None:
        ended = server.process.exit_status() if server.process is not None else None
        if ended is not None:
            await self._lost(server, ended)
            return
        if server.is_busy_updating:
            server.silent_since = None
            return
        try:
            async with asyncio.timeout(self._patience_s):
                info = await self._client.info(server.url)
        except (ServerError, TimeoutError) as error:
            await self._note_silence(server, error)
            return
        server.silent_since = None
        self._welcome(server, info)

    def _welcome(self, server: Server, info: ServerInfo) -> None:
        """It answers; is it the process that it was?"""
        if server.info is None or server.info.instance != info.instance:
            if problem := self._version_problem(server, info):
                self.fatal = problem
                return
            server.info = info
            server.incarnation += 1
            _log.info(
                "server %s is up: SGLang %s, tensor parallel %d, %s",
                server.url,
                info.version,
                info.tensor_parallel_size,
                info.device,
            )
        elif server.health is not Health.UP:
            _log.info("server %s answers again", server.url)
        server.health = Health.UP

    def _version_problem(self, server: Server, info: ServerInfo) -> ConfigurationError | None:
        if info.version in TESTED_VERSIONS or self._rollout.allow_untested_version:
            return None
        return ConfigurationError(
            f"server {server.url} runs SGLang {info.version}, and this client was tested with "
            f"{', '.join(TESTED_VERSIONS)}; install that, or set "
            "rollout.allow_untested_version=true"
        )

    async def _note_silence(self, server: Server, error: Exception) -> None:
        now = time.monotonic()
        server.silent_since = server.silent_since or now
        silent_s = now - server.silent_since
        if server.health is Health.STARTING:
            limit_s = self._rollout.launch.start_timeout_s
        else:
            limit_s = self._patience_s
            if server.health is Health.UP:
                server.health = Health.SUSPECT
        # A probe that timed out has already waited as long as a silence may last.
        has_waited = isinstance(error, TimeoutError) and server.health is not Health.STARTING
        if silent_s >= limit_s or has_waited:
            await self._lost(server, f"gave no answer for {max(silent_s, limit_s):.0f} s ({error})")

    async def _lost(self, server: Server, reason: str) -> None:
        """Restart it, or wait for it to come back."""
        if server.process is None:
            if server.health is not Health.DOWN:
                _log.warning("server %s %s; it is out until it answers", server.url, reason)
            server.health = Health.DOWN
            return
        process = server.process
        if server.incarnation == 0:
            self.fatal = RunError(
                f"{process.name} did not start: it {reason}; {process.log} says why, at its end: "
                f"{process.last_words()[:300]!r}"
            )
            return
        if server.num_restarts >= self._rollout.launch.max_restarts:
            _log.error(
                "%s at %s %s; it was restarted %d times and is given up",
                *(process.name, server.url, reason, server.num_restarts),
            )
            server.health = Health.GIVEN_UP
            await asyncio.to_thread(process.kill)
            return
        server.num_restarts += 1
        self.num_restarts += 1
        _log.warning(
            "%s at %s %s; restart %d of %d",
            *(process.name, server.url, reason),
            *(server.num_restarts, self._rollout.launch.max_restarts),
        )
        was_starting = server.health is Health.STARTING
        server.health = Health.STARTING
        self._on_change(server)
        if was_starting:  # it fell while it started: not at once again
            await asyncio.sleep(min(2.0**server.num_restarts, _MAX_BACKOFF_S))
        await self._start(process)
        server.silent_since = time.monotonic()

    async def _start(self, process: ManagedProcess) -> None:
        try:
            await asyncio.to_thread(process.start)
        except OSError as error:
            self.fatal = RunError(
                f"{process.name} cannot be started: {error}; its log would be {process.log}"
            )

    def _stop_if_failed(self, task: "asyncio.Task[None]") -> None:
        """A server that nobody watches would be waited for without end."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fatal = RunError(f"watching the rollout servers failed: {error!r}")

    async def replace(self, server: Server, reason: str) -> None:
        """Its weights or its answers are wrong: restart it, or wait for a better time."""
        if server.process is None:
            _log.warning("server %s %s; it is out until it takes weights again", server.url, reason)
            return
        async with server.lock:
            if server.health is Health.STARTING:  # it has been lost and restarted meanwhile
                return
            await self._lost(server, reason)
        self._on_change(server)


def describe(error: Exception) -> str:
    """One line for a log."""
    text = str(error) if isinstance(error, CallRefused | RunError) else repr(error)
    return " ".join(text.split())
