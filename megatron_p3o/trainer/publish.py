"""The policy's weights to the rollout servers, after every step, from any trainer layout.

All ranks walk through `named_tensors`, whose every tensor is a collective; rank 0 converts, fills
buckets and sends. Whatever happens to servers, or to rank 0's disk, rank 0 walks to the end before
anything is raised, and then all ranks raise alike, so that nobody waits in a collective.

    named_tensors -> served numbers -> [kept copy] -> [expected checksums] -> buckets -> servers

A server that failed, or that was restarted between two publications, catches up alone: from the
kept copy (`catch_up`, at any time, rank 0 only), or with the others at the next publication.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from megatron_p3o.architecture import ModelArchitecture
from megatron_p3o.errors import RunError, UserError
from megatron_p3o.rollout.sglang import (
    BucketTransport,
    DistributedTransport,
    InterruptMode,
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

TransportName = Literal["tensor", "distributed", "disk"]
_SHOWN_NAMES = 3


class Ranks(Protocol):
    """What publishing needs of `ParallelContext`."""

    @property
    def rank(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def gather_objects(self, value: Any) -> list[Any]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishOptions:
    """How weights are published."""

    transport: TransportName
    directory: Path
    """Where versions are written, for `disk` and for kept copies; servers must be able to read it
    at this path."""
    interrupt: InterruptMode = "wait"
    bucket_bytes: int = 512 * 1024 * 1024
    keep_copy: bool = False
    """Also write every version to `directory`, so that a restarted server can catch up at once;
    `disk` does so anyway. Only the last version is kept."""
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
    """The model directory, for tokenizer and generation files of kept copies."""


class Publisher:
    """Brings servers to the trainer's version. One per rank."""

    def __init__(self, ranks: Ranks, model: PublishedModel, options: PublishOptions) -> None:
        self._ranks = ranks
        self._model = model
        self._options = options
        self._transport = _make_transport(options, ranks.device)
        self._num_published = 0
        self._kept: tuple[Path, int] | None = None

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
        outcome = self._ranks.gather_objects(outcome)[0]
        assert outcome is not None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def catch_up(self, server: ServerControl) -> bool:
        """Bring one server to the last published version, on rank 0, without the other ranks.

        For a server that was restarted: nothing runs there, and it must not serve before this.

        Returns:
            False if no copy is kept; the server then waits for the next publication.

        Raises:
            ControlError: the server did not take it.
        """
        if self._kept is None:
            return False
        directory, version = self._kept
        server.update_from_disk(str(directory), flush_cache=True, version=str(version))
        server.continue_generation()
        return True

    @property
    def kept(self) -> tuple[Path, int] | None:
        """Directory and version of the copy, which a server can also be started from."""
        return self._kept

    def close(self) -> None:
        """Leave the process groups. The kept copy stays for servers that outlive the run."""
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
        due = self._verification_due()
        if due:
            taps.append(verification.add)
        destination = (options.directory / f"version_{version}").absolute()
        with ExitStack() as stack:
            writer = None
            if options.keep_copy or self._transport is None:
                writer = stack.enter_context(self._writer(destination))
                taps.append(writer.add)
            served = served_tensors(stream, self._model.architecture, self._model.served)
            tensors = _tapped(served, taps)
            if self._transport is None:
                nbytes = sum(tensor.nbytes for _, tensor in tensors)
                self._commit(writer, destination, version)
                update.pause()
                update.load(str(destination), nbytes)
            else:
                update.pause()
                update.send(fill_buckets(tensors, options.bucket_bytes), self._transport)
                self._commit(writer, destination, version)
        if due:
            update.verify(verification.wrong, is_proof=verification.is_proof)
        update.resume()
        self._num_published += 1
        return update.report(self._transport)

    def _verification_due(self) -> bool:
        every = self._options.verify_every
        return every > 0 and self._num_published % every == 0

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

    def _commit(self, writer: VersionWriter | None, destination: Path, version: int) -> None:
        """Make the copy the kept one, and remove the one before."""
        if writer is None:
            return
        writer.commit()
        previous, self._kept = self._kept, (destination, version)
        if previous is not None and previous[0] != destination:
            shutil.rmtree(previous[0], ignore_errors=True)


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
