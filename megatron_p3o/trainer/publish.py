"""The policy's weights to the rollout servers, after every step, from any trainer layout.

All ranks walk through `named_tensors`, whose every tensor is a collective; rank 0 converts, fills
buckets and sends. Whatever happens to servers, or to rank 0's disk, rank 0 walks to the end before
anything is raised, and then all ranks raise alike, so that nobody waits in a collective.

    named_tensors -> served numbers -> [expected checksums] -> buckets, or files -> servers

A server that failed, or that was restarted, gets the weights by another call, alone or with the
others.
"""

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_p3o.architecture import ModelArchitecture
from megatron_p3o.config import Interrupt, Transport
from megatron_p3o.errors import RunError, UserError
from megatron_p3o.rollout.sglang import (
    BucketTransport,
    DistributedTransport,
    PublishReport,
    ServerControl,
    Target,
    TensorTransport,
    WeightUpdate,
)
from megatron_p3o.weights.publish import (
    ChecksumReport,
    ServedFormat,
    ServerChecksums,
    VersionWriter,
    fill_buckets,
    served_tensors,
)

_SHOWN_NAMES = 3
_MAX_TEXT_BYTES = 32 * 1024 * 1024


class Ranks(Protocol):
    """What publishing needs of `ParallelContext`."""

    @property
    def rank(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def broadcast_object(self, value: Any) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishOptions:
    """How weights are published."""

    transport: Transport
    directory: Path
    """Where versions are written, for `disk`; servers must be able to read it at this path."""
    interrupt: Interrupt = "wait"
    bucket_bytes: int = 512 * 1024 * 1024
    verify_every: int = 10
    """Compare checksums at the first publication and at every so many after it; 0: never."""
    timeout_s: float = 300.0
    """Deadline of one control call or broadcast, seconds."""
    drain_timeout_s: float = 300.0
    """How long interrupt mode `wait` waits for running requests, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedModel:
    """What is published: the model and the numbers it is served in."""

    architecture: ModelArchitecture
    served: ServedFormat
    held: torch.dtype
    """Of the trainer's parameters."""
    config: Mapping[str, Any]
    """The model's config.json."""
    files: Path
    """The model directory, for tokenizer and generation files of what is written."""


class Publisher:
    """Brings servers to the trainer's version. One per rank."""

    def __init__(self, ranks: Ranks, model: PublishedModel, options: PublishOptions) -> None:
        self._ranks = ranks
        self._model = model
        self._options = options
        self._transport = _make_transport(options, ranks.device)
        self._num_published = 0
        self._last_version: int | None = None
        self._written: Path | None = None

    def publish(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        version: int,
        servers: Sequence[ServerControl],
    ) -> PublishReport:
        """Send the model to the servers. Collective.

        Args:
            named_tensors: the whole model, walked through on every rank.
            version: of these weights.
            servers: all that are alive, also those that hold no version yet; read on rank 0.

        Returns:
            Who took it, the same on every rank. A server that failed is left paused and must be
            restarted before it serves again. Only if the report is complete may the version be
            taken for that of the whole cluster.

        Raises:
            RunError: on every rank: the weights are not finite, or a copy cannot be written.
            UserError: on every rank: the transport cannot reach such a server.
        """
        stream = iter(named_tensors)
        outcome: PublishReport | RunError | UserError | None = None
        if self._ranks.rank == 0:
            try:
                outcome = self._publish(stream, version, servers)
            except (RunError, UserError) as error:
                outcome = error
            except OSError as error:
                outcome = RunError(
                    f"version {version} cannot be written to "
                    f"{str(self._options.directory)!r}: {error}"
                )
        # The other ranks are in the collectives of the tensors that are left.
        for _ in stream:
            pass
        outcome = self._ranks.broadcast_object(outcome)
        assert outcome is not None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self) -> None:
        """Leave the process groups. The last version stays for servers that outlive the run."""
        if self._transport is not None and self._ranks.rank == 0:
            self._transport.close()

    def _publish(
        self, stream: Iterator[tuple[str, Tensor]], version: int, servers: Sequence[ServerControl]
    ) -> PublishReport:
        options = self._options
        update = WeightUpdate(
            servers,
            version,
            interrupt=options.interrupt,
            drain_timeout_s=options.drain_timeout_s,
        )
        update.prepare(self._transport)
        verification = _Verification(self._model.architecture, update.targets)
        taps: list[Callable[[str, Tensor], None]] = []
        due = self._verification_due(version)
        if due:
            taps.append(verification.add)
        destination = (options.directory / f"version_{version}").absolute()
        with ExitStack() as stack:
            writer = None
            if self._transport is None:
                writer = stack.enter_context(self._writer(destination))
                taps.append(writer.add)
            served = served_tensors(stream, self._model.architecture, self._model.served)
            tensors = _tapped(served, taps)
            if self._transport is None:
                nbytes = sum(tensor.nbytes for _, tensor in tensors)
                assert writer is not None
                self._commit(writer, destination)
                update.pause()
                update.load(str(destination), nbytes)
            else:
                update.pause()
                update.send(fill_buckets(tensors, self._bucket_bytes()), self._transport)
        if due:
            update.verify(verification.wrong, is_proof=verification.is_proof)
        update.resume()
        self._num_published += version != self._last_version
        self._last_version = version
        return update.report(self._transport)

    def _bucket_bytes(self) -> int:
        """As configured; less where the bucket travels in the request, as text, which both sides
        copy several times."""
        is_text = self._options.transport == "tensor" and self._ranks.device.type == "cpu"
        return min(self._options.bucket_bytes, _MAX_TEXT_BYTES if is_text else sys.maxsize)

    def _verification_due(self, version: int) -> bool:
        """Servers that get a version later than the others are always checked."""
        every = self._options.verify_every
        is_late = version == self._last_version
        return every > 0 and (is_late or self._num_published % every == 0)

    def _writer(self, destination: Path) -> VersionWriter:
        # Of a run that published this version before it was resumed from a checkpoint.
        shutil.rmtree(destination, ignore_errors=True)
        return VersionWriter(
            destination,
            self._model.architecture,
            self._model.served,
            config=self._model.config,
            files=self._model.files,
            held=self._model.held,
        )

    def _commit(self, writer: VersionWriter, destination: Path) -> None:
        """Make the version appear, and remove the one before."""
        writer.commit()
        previous, self._written = self._written, destination
        if previous is not None and previous != destination:
            shutil.rmtree(previous, ignore_errors=True)


class _Verification:
    """Finds servers with other weights than the trainer's, as far as that can be told.

    A server on a GPU hashes in its own way, and the fused parameters of some models are not
    described here; such servers are compared with each other.
    """

    def __init__(self, architecture: ModelArchitecture, targets: Sequence[Target]) -> None:
        self.is_proof = ServerChecksums.can_predict(architecture) and all(
            target.info.device == "cpu" for target in targets
        )
        sizes = {target.info.tensor_parallel_size for target in targets}
        self._expected: dict[int, ServerChecksums] = {}
        if self.is_proof:
            self._expected = {size: ServerChecksums(architecture, size) for size in sizes}
        self._first: dict[int, tuple[str, Sequence[Mapping[str, str]]]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        for expected in self._expected.values():
            expected.add(name, tensor)

    def wrong(self, target: Target, ranks: Sequence[Mapping[str, str]]) -> str | None:
        size = target.info.tensor_parallel_size
        if size in self._expected:
            return _difference(self._expected[size].compare(ranks))
        url, first = self._first.setdefault(size, (target.control.url, ranks))
        if ranks == first:
            return None
        return f"its parameters have other checksums than those of {url} after the same update"


def _difference(report: ChecksumReport) -> str | None:
    if report.is_proof:
        return None
    kinds = {"differ": report.different, "are missing": report.absent}
    found = [
        f"{len(names)} parameters {kind} ({', '.join(names[:_SHOWN_NAMES])})"
        for kind, names in kinds.items()
        if names
    ]
    return f"{' and '.join(found)} after the update; {report.num_equal} are as sent"


def _tapped(
    tensors: Iterable[tuple[str, Tensor]], taps: Sequence[Callable[[str, Tensor], None]]
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        for tap in taps:
            tap(name, tensor)
        yield name, tensor


def _make_transport(options: PublishOptions, device: torch.device) -> BucketTransport | None:
    if options.transport == "tensor":
        return TensorTransport()
    if options.transport == "distributed":
        return DistributedTransport(device, timeout_s=options.timeout_s)
    return None
