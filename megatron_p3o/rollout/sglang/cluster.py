"""A run's servers, from its configuration: started or given, with a client and a queue."""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_p3o.config import RolloutSection
from megatron_p3o.rollout.sglang.client import GenerateClient, GenerateOptions
from megatron_p3o.rollout.sglang.errors import ServerError
from megatron_p3o.rollout.sglang.flags import Command, ServerFlags
from megatron_p3o.rollout.sglang.fleet import Fleet
from megatron_p3o.rollout.sglang.process import ManagedProcess
from megatron_p3o.rollout.sglang.sampler import Response, Sampler
from megatron_p3o.rollout.sglang.supervisor import Server
from megatron_p3o.types import Sample, VersionSpan

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSet:
    """Servers, and the router in front of them."""

    servers: tuple[Server, ...]
    router: tuple[str, ManagedProcess | None] | None


def given_servers(rollout: RolloutSection) -> ServerSet:
    """Servers that somebody else runs."""
    servers = tuple(Server(url=url.rstrip("/")) for url in rollout.servers)
    router = None if rollout.router is None else (rollout.router.rstrip("/"), None)
    return ServerSet(servers=servers, router=router)


def managed_servers(flags: ServerFlags) -> ServerSet:
    """Servers of this node, to be started.

    Their logs are server_<N>.log and router.log in the flags' directory.
    """
    launch = flags.config.rollout.launch
    first, count = launch.port, launch.replicas + 2
    ports = free_ports(launch.host, count) if first == 0 else list(range(first, first + count))
    *numbers, metrics_port = ports
    urls = [f"http://{_client_host(launch.host)}:{port}" for port in numbers]
    servers = tuple(
        Server(
            url=urls[replica],
            process=ManagedProcess(
                f"server {replica}",
                _server_command(flags, replica, numbers[replica]),
                flags.directory / f"server_{replica}.log",
            ),
        )
        for replica in range(launch.replicas)
    )
    router = None
    if launch.router:
        process = ManagedProcess(
            "router",
            lambda _: flags.router(numbers[-1], metrics_port, tuple(urls[:-1])),
            flags.directory / "router.log",
        )
        router = (urls[-1], process)
    return ServerSet(servers=servers, router=router)


class Cluster:
    """Servers with everything that makes samples on them. Belongs to one event loop."""

    def __init__(
        self,
        server_set: ServerSet,
        rollout: RolloutSection,
        options: GenerateOptions,
        *,
        api_key: str | None,
        on_event: Callable[[], None],
        patience_s: float | None = None,
    ) -> None:
        """
        Args:
            server_set: given or managed.
            rollout: limits and deadlines.
            options: of every request.
            api_key: of the servers.
            on_event: see `Fleet`.
            patience_s: see `Fleet`.
        """
        self._client = GenerateClient(options, api_key=api_key)
        self._request_timeout_s = rollout.request_timeout_s
        self.fleet = Fleet(
            server_set.servers,
            self._client,
            rollout,
            api_key=api_key,
            on_event=on_event,
            router=server_set.router,
            patience_s=patience_s,
        )
        self.sampler = Sampler(self.fleet, self._client, rollout)

    async def start(self) -> None:
        await self.fleet.start()

    async def close(self) -> None:
        await self.fleet.close()
        await self._client.close()

    async def parity_samples(
        self, prompts: Sequence[tuple[int, ...]], max_new_tokens: int
    ) -> dict[str, list[Sample]]:
        """One sample of every prompt from every serving server, by URL; a server that fails is
        left out."""
        found: dict[str, list[Sample]] = {}
        for url in self.fleet.serving_urls():
            try:
                found[url] = [
                    await self._parity_sample(url, index, prompt_ids, max_new_tokens)
                    for index, prompt_ids in enumerate(prompts)
                ]
            except (ServerError, TimeoutError) as error:  # the supervisor sees to it
                _log.warning("server %s gives no samples to compare: %s", url, error)
        return found

    async def _parity_sample(
        self, url: str, index: int, prompt_ids: tuple[int, ...], max_new_tokens: int
    ) -> Sample:
        response = Response()
        async with asyncio.timeout(self._request_timeout_s):
            reply = await self._client.generate(url, prompt_ids, max_new_tokens)
        response.extend(reply)
        if reply.finish_reason == "stop":
            response.finish_reason = "stop"
        return _parity_sample(index, prompt_ids, response)

    def totals(self) -> dict[str, float]:
        """Counts and seconds since the start, by metric name."""
        return {
            "rollout/retries": float(self.sampler.num_retries),
            "rollout/continued": float(self.sampler.num_continued),
            "rollout/server_restarts": float(self.fleet.num_restarts),
            "rollout/busy_s": self.fleet.busy_until_now(),
        }


def free_ports(host: str, count: int) -> list[int]:
    """Ports that nobody listens on just now."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _server_command(flags: ServerFlags, replica: int, port: int) -> Callable[[int], Command]:
    return lambda num_starts: flags.server(replica, port, num_starts)


def _client_host(host: str) -> str:
    """Where a client on this node finds what listens at `host`."""
    return "127.0.0.1" if host == "0.0.0.0" else host


def _parity_sample(index: int, prompt_ids: tuple[int, ...], response: Response) -> Sample:
    versions = [span.version for span in response.version_spans]
    return Sample(
        prompt_id=f"parity-{index}",
        sample_index=0,
        prompt_ids=prompt_ids,
        response_ids=tuple(response.token_ids),
        rollout_logprobs=tuple(response.logprobs),
        finish_reason=response.finish_reason,
        weight_version_min=min(versions),
        weight_version_max=max(versions),
        version_spans=tuple(VersionSpan(*span) for span in response.version_spans)
        if len(versions) > 1
        else (),
        routed_experts=response.routed_experts,
    )
