"""How a bucket of weights gets from the trainer's first rank into a server.

    tensor       server on the same host: it opens the bucket's memory (CUDA IPC), or gets the bytes
                 (CPU)
    distributed  anywhere: a broadcast in a process group of the sender and the server's ranks
                 (NCCL from a GPU, gloo from a CPU); one group per server

One group per server costs the sender one copy of the model per server instead of one in all, and
buys that a server which dies or refuses takes nobody with it. The control call and the broadcast
run side by side: a server that refuses the call never joins the broadcast, so the sender watches
both and leaves as soon as one has failed.

The third transport, `disk`, needs no bucket: see `megatron_p3o.rollout.sglang.update`.
"""

import socket
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, Queue
from threading import Thread
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_p3o.errors import ConfigurationError
from megatron_p3o.rollout.sglang.control import ServerControl, ServerInfo, TensorDescription
from megatron_p3o.rollout.sglang.errors import ServerError, ServerTimeout, ServerUnreachable
from megatron_p3o.rollout.sglang.payload import bucket_payloads
from megatron_p3o.types import WeightBucket

# What the other half of a failed pair gets to say why.
_GRACE_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A server that is being updated."""

    control: ServerControl
    info: ServerInfo


class BucketTransport(Protocol):
    """Moves buckets. `pack` is called from one thread, what it returns from one per server."""

    def connect(self, target: Target) -> None:
        """Make ready for a server; nothing to do for one that is connected.

        Raises:
            ServerError: the server does not take part.
            ConfigurationError: the transport cannot reach such a server.
        """
        ...

    def pack(self, bucket: WeightBucket, target: Target) -> Callable[[bool, str | None], None]:
        """A call that sends the bucket, given whether to flush the server's cache and the version
        to set; it raises ServerError, and the bucket must stay as it is until it is over."""
        ...

    def forget(self, url: str) -> None:
        """Drop what belongs to a server that failed or ended, without asking it."""
        ...

    def close(self) -> None: ...


class TensorTransport:
    """To servers on the same host, which read the sender's memory."""

    def connect(self, target: Target) -> None:
        host = target.control.host
        if not _is_this_host(host):
            raise ConfigurationError(
                f"rollout.publish.transport=tensor shares memory with the server, but "
                f"{target.control.url} is on another host; use distributed or disk"
            )

    def pack(self, bucket: WeightBucket, target: Target) -> Callable[[bool, str | None], None]:
        payloads = bucket_payloads(bucket, target.info.tensor_parallel_size)

        def send(flush_cache: bool, version: str | None) -> None:
            target.control.update_from_tensor(payloads, flush_cache=flush_cache, version=version)

        return send

    def forget(self, url: str) -> None:
        pass

    def close(self) -> None:
        pass


class DistributedTransport:
    """By broadcast, in one process group per server."""

    def __init__(self, device: torch.device, *, timeout_s: float) -> None:
        """
        Args:
            device: where the buckets are; decides between NCCL and gloo.
            timeout_s: after which a group that does not form or a broadcast that does not end is
                given up, seconds.
        """
        self._device = device
        self._timeout_s = timeout_s
        self._groups: dict[str, _UpdateGroup] = {}

    def connect(self, target: Target) -> None:
        url = target.control.url
        if url in self._groups:
            if self._groups[url].instance == target.info.instance:
                return
            self.forget(url)  # the server has been restarted
        self._groups[url] = _UpdateGroup(target, self._device, timeout_s=self._timeout_s)

    def pack(self, bucket: WeightBucket, target: Target) -> Callable[[bool, str | None], None]:
        group = self._groups[target.control.url]

        def send(flush_cache: bool, version: str | None) -> None:
            group.send(bucket, flush_cache=flush_cache, version=version)

        return send

    def forget(self, url: str) -> None:
        group = self._groups.pop(url, None)
        if group is not None:
            group.abandon()

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups.clear()


class _UpdateGroup:
    """The sender and the tensor ranks of one server process, with a store of their own."""

    def __init__(self, target: Target, device: torch.device, *, timeout_s: float) -> None:
        self.instance = target.info.instance
        self._control = target.control
        self._device = device
        self._timeout_s = timeout_s
        # A fresh name and store: a restarted server must not meet what its predecessor left.
        self._name = f"p3o-{uuid.uuid4().hex}"
        world_size = 1 + target.info.tensor_parallel_size
        address = _address_towards(target.control)
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(
            address, 0, world_size, is_master=True, wait_for_workers=False, timeout=timeout
        )
        backend = "nccl" if device.type == "cuda" else "gloo"
        # As a server prefixes its keys: by its own name for the group, then by torch's rules.
        keys = dist.PrefixStore(
            f"{device.type}/",
            dist.PrefixStore(f"{self._name}/", dist.PrefixStore(self._name, store)),
        )
        self._store = store
        self._backend: Any = None

        def form() -> None:
            self._backend = _make_backend(backend, keys, world_size, timeout, device)

        def invite() -> None:
            target.control.init_update_group(
                address=address,
                port=store.port,
                world_size=world_size,
                name=self._name,
                backend=backend,
            )

        self._both(invite, form)

    def send(self, bucket: WeightBucket, *, flush_cache: bool, version: str | None) -> None:
        tensors = [
            TensorDescription(
                name=entry.name, dtype=str(entry.dtype).removeprefix("torch."), shape=entry.shape
            )
            for entry in bucket.entries
        ]

        def announce() -> None:
            self._control.update_from_group(
                tensors, group=self._name, flush_cache=flush_cache, version=version
            )

        self._both(announce, lambda: _broadcast(self._backend, bucket.data, self._timeout_s))

    def abandon(self) -> None:
        """Leave without the server; a broadcast in progress is told to stop."""
        if self._backend is not None:
            self._backend.abort()
        self._backend = None

    def close(self) -> None:
        with suppress(ServerError):  # the server is gone, and its half of the group with it
            self._control.destroy_update_group(self._name)
        self.abandon()

    def _both(self, call: Callable[[], None], collective: Callable[[], None]) -> None:
        """Run the control call and its collective; the first failure ends both for the caller.

        Raises:
            ServerError: either failed, or took longer than its deadline.
        """
        outcomes: Queue[tuple[str, RuntimeError | None]] = Queue()
        for name, function in (("call", call), ("collective", collective)):
            # Daemons: nobody waits for a collective that the server has left.
            Thread(target=_report_to, args=(outcomes, name, function), daemon=True).start()
        errors: dict[str, RuntimeError] = {}
        patience = self._timeout_s
        for _ in range(2):
            try:
                name, error = outcomes.get(timeout=patience)
            except Empty:
                break
            if error is not None:
                errors[name] = error
                patience = _GRACE_S
                if name == "call":
                    break
        else:
            if not errors:
                return
        raise self._failure(errors)

    def _failure(self, errors: dict[str, RuntimeError]) -> ServerError:
        call, collective = errors.get("call"), errors.get("collective")
        if isinstance(call, ServerError):
            return call
        if call is not None:
            raise call
        if collective is not None:
            return ServerUnreachable(f"{self._control.url} left the process group: {collective!r}")
        return ServerTimeout(
            f"{self._control.url} did not finish its part in the process group within "
            f"{self._timeout_s:g} s"
        )


def _report_to(
    outcomes: "Queue[tuple[str, RuntimeError | None]]", name: str, function: Callable[[], None]
) -> None:
    """Run in a thread, whose failure would otherwise be lost."""
    try:
        function()
    except RuntimeError as error:  # control errors and torch.distributed's
        outcomes.put((name, error))
    else:
        outcomes.put((name, None))


def _make_backend(
    name: str, keys: dist.Store, world_size: int, timeout: timedelta, device: torch.device
) -> Any:
    """Rank 0's communicator. Not a group of torch's registry, whose shutdown would wait for it."""
    if name == "gloo":
        return dist.ProcessGroupGloo(keys, 0, world_size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    with torch.cuda.device(device):
        return dist.ProcessGroupNCCL(keys, 0, world_size, options)


def _broadcast(backend: Any, data: Tensor, timeout_s: float) -> None:
    """From rank 0; returns when the memory may be used again."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    if not data.is_cuda:
        backend.broadcast([data], options).wait(timedelta(seconds=timeout_s))
        return
    with torch.cuda.device(data.device):
        backend.broadcast([data], options).wait(timedelta(seconds=timeout_s))
        torch.cuda.current_stream().synchronize()


def _address_towards(control: ServerControl) -> str:
    """This host's address on the way to a server; no packet is sent."""
    infos = socket.getaddrinfo(control.host, 9, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, peer = infos[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(peer)
        return str(probe.getsockname()[0])


def _is_this_host(host: str) -> bool:
    """Whether packets to the host come from the address they go to."""
    infos: Sequence[Any] = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, peer = infos[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(peer)
        return bool(probe.getsockname()[0] == peer[0]) or peer[0].startswith("127.")
