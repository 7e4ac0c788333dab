"""Rollouts on SGLang servers, as a source that all ranks share.

    rank 0                                       every rank
    loop thread: servers, samples, rewards       collect: wait for rank 0's verdict, again and again
    main thread: one rank of the trainer         publish: walk through the weights, rank 0 sends

Rank 0 alone knows the servers. While it waits for them it tells the other ranks so every few
seconds, so that nobody waits in one collective for as long as a generation takes; a server that
came back without weights gets them meanwhile, from the same weights.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_p3o.config import RunConfig
from megatron_p3o.data import PromptSet
from megatron_p3o.errors import RunError, UserError
from megatron_p3o.parallel.setup import ParallelContext
from megatron_p3o.rollout.sglang import Cluster, LoopThread, PublishReport, ServerControl
from megatron_p3o.trainer.experience import Collected, Weights, check_prompts
from megatron_p3o.trainer.producer import BatchProducer
from megatron_p3o.trainer.publish import Publisher
from megatron_p3o.types import Sample

# Rank 0 looks at its servers this often while it waits, and speaks to the other ranks this often.
_LOOK_S = 1.0
_SPEAK_S = 20.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Verdict:
    """What rank 0 tells all ranks while they wait; empty: nothing yet."""

    result: Any = None
    needs_weights: bool = False
    error: RunError | UserError | None = None


class ClusterRollouts:
    """Groups from SGLang servers; a `RolloutSource`."""

    def __init__(
        self,
        config: RunConfig,
        context: ParallelContext,
        publisher: Publisher,
        *,
        prompts: PromptSet,
        tokenizer: PreTrainedTokenizerBase,
        make_cluster: Callable[[Callable[[], None]], Cluster],
    ) -> None:
        """
        Args:
            config: of the run.
            context: where this rank stands.
            publisher: of this rank.
            prompts: of the run.
            tokenizer: of the model.
            make_cluster: called on rank 0 with what the cluster calls when something happened.

        Raises:
            InputError: a prompt cannot be encoded.
        """
        self._config = config
        self._context = context
        self._publisher = publisher
        self._weights: Weights | None = None
        self._version = 0
        self._lead: _Lead | None = None
        check_prompts(prompts, tokenizer, config, context)
        if context.rank == 0:
            self._lead = _Lead(config, make_cluster, prompts=prompts, tokenizer=tokenizer)

    def collect(self, step: int) -> Collected:
        """The step's groups, on every rank, with later steps begun behind them. Collective.

        Raises:
            RunError: on every rank: a sample or too many rewards failed, or no server could serve
                for too long.
        """
        if self._lead is not None:
            self._lead.begin(step, self._version)
        return self._wait(_Lead.next_verdict)

    def publish(self, weights: Weights, version: int) -> None:
        """Give the weights to every server that answers. Collective.

        Args:
            weights: the whole model; called again, until the next publication, for servers that
                come back later.
            version: of these weights.

        Raises:
            RunError: on every rank: no server started, or the weights cannot be sent.
            UserError: on every rank: a server of another version, or out of the transport's reach.
        """
        if self._weights is None:
            self._wait(_Lead.servers_verdict)
        self._weights, self._version = weights, version
        self._send(only_in_need=False)

    def parity_samples(self) -> dict[str, list[Sample]]:
        """A few samples of each server under the weights published last, by URL. Collective."""
        count = self._config.rollout.parity_check.samples_per_server
        if not count:
            return {}
        if self._lead is not None:
            self._lead.begin_parity(count)
        return self._wait(_Lead.next_verdict)

    def state(self) -> dict[str, Any]:
        state = None if self._lead is None else self._lead.state()
        return self._context.broadcast_object(state)

    def load_state(self, state: dict[str, Any]) -> None:
        if self._lead is not None:
            self._lead.load_state(state)

    def close(self) -> None:
        """End generation, threads, and the servers that were started."""
        if self._lead is not None:
            self._lead.close()
        self._publisher.close()

    def _wait(self, decide: Callable[["_Lead"], _Verdict]) -> Any:
        """Until rank 0 has a result; servers in need of weights get them on the way."""
        while True:
            mine = None if self._lead is None else decide(self._lead)
            verdict: _Verdict = self._context.broadcast_object(mine)
            if verdict.error is not None:
                raise verdict.error
            if verdict.needs_weights:
                self._send(only_in_need=True)
            elif verdict.result is not None:
                return verdict.result

    def _send(self, *, only_in_need: bool) -> None:
        assert self._weights is not None
        servers: list[ServerControl] = []
        if self._lead is not None:
            servers = self._lead.begin_update(self._version, only_in_need=only_in_need)
        report = None
        try:
            report = self._publisher.publish(self._weights(), self._version, servers)
        finally:
            if self._lead is not None:
                self._lead.end_update(report, self._version)


@dataclass
class _Counters:
    """Running totals of which a step's metrics are the differences."""

    values: dict[str, float] = field(default_factory=dict)

    def step(self, totals: Mapping[str, float]) -> dict[str, float]:
        found = {name: value - self.values.get(name, 0.0) for name, value in totals.items()}
        self.values = dict(totals)
        return found


class _Lead:
    """Rank 0's part: the servers and what they are working on, behind calls that return soon."""

    def __init__(
        self,
        config: RunConfig,
        make_cluster: Callable[[Callable[[], None]], Cluster],
        *,
        prompts: PromptSet,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._config = config
        self._happened = threading.Event()
        self._loop = LoopThread("rollout")
        self._counters = _Counters()
        self._bytes = 0
        self._pending: Any = None

        def build() -> tuple[Cluster, BatchProducer]:
            cluster = make_cluster(self._happened.set)
            producer = BatchProducer(config, cluster.sampler, prompts=prompts, tokenizer=tokenizer)
            return cluster, producer

        self._cluster, self._producer = self._loop.call(build)
        self._loop.run(self._cluster.start())

    def begin(self, step: int, version: int) -> None:
        """Begin the step's batch and those that may be ahead of it."""

        def start() -> None:
            self._producer.start_up_to(step)

        self._loop.call(start)
        self._await(self._producer.take(step, version))

    def begin_parity(self, count: int) -> None:
        prompts = self._producer.parity_prompts(count)
        length = self._config.rollout.parity_check.max_new_tokens
        length = min(length, self._config.sampling.max_new_tokens)
        self._await(self._cluster.parity_samples(prompts, length))

    def next_verdict(self) -> _Verdict:
        """The pending result, or why there is none, at the latest after `_SPEAK_S`."""
        deadline = time.monotonic() + _SPEAK_S
        while True:
            # Cleared first: what happens from here on wakes the wait below.
            self._happened.clear()
            if self._pending.done():
                return self._finished()
            if error := self._loop.call(self._cluster.fleet.problem):
                return _Verdict(error=error)
            if self._loop.call(self._cluster.fleet.in_need):
                return _Verdict(needs_weights=True)
            if time.monotonic() >= deadline:
                return _Verdict()
            self._happened.wait(_LOOK_S)

    def servers_verdict(self) -> _Verdict:
        """Whether the servers have started, at the latest after `_SPEAK_S`."""
        deadline = time.monotonic() + _SPEAK_S
        fleet = self._cluster.fleet
        while True:
            if error := self._loop.call(fleet.problem):
                return _Verdict(error=error)
            if self._loop.call(lambda: not fleet.is_starting and bool(fleet.in_need())):
                return _Verdict(result=True)
            if time.monotonic() >= deadline:
                return _Verdict()
            self._happened.clear()
            self._happened.wait(_LOOK_S)

    def begin_update(self, version: int, *, only_in_need: bool) -> list[ServerControl]:
        return self._loop.call(
            lambda: self._cluster.fleet.begin_update(version, only_in_need=only_in_need)
        )

    def end_update(self, report: PublishReport | None, version: int) -> None:
        self._loop.call(lambda: self._cluster.fleet.end_update(report, version))
        if report is not None:
            self._bytes += report.nbytes * len(report.acknowledged)
            if report.failed and not report.acknowledged:
                _log.warning("no server took weight version %d; waiting for servers", version)

    def state(self) -> dict[str, Any]:
        return self._loop.call(self._producer.state)

    def load_state(self, state: dict[str, Any]) -> None:
        self._loop.call(lambda: self._producer.load_state(state))

    def close(self) -> None:
        self._loop.call(self._producer.close)
        self._loop.run(self._cluster.close())
        self._loop.close()

    def _await(self, coroutine: Any) -> None:
        self._pending = self._loop.submit(coroutine)
        self._pending.add_done_callback(lambda _: self._happened.set())

    def _finished(self) -> _Verdict:
        try:
            result = self._pending.result()
        except (RunError, UserError) as error:
            return _Verdict(error=error)
        if isinstance(result, Collected):
            result = Collected(
                groups=result.groups, metrics={**result.metrics, **self._step_metrics()}
            )
        return _Verdict(result=result)

    def _step_metrics(self) -> dict[str, float]:
        fleet = self._cluster.fleet
        totals = {**self._loop.call(self._cluster.totals), "publish/bytes": float(self._bytes)}
        return {
            **self._counters.step(totals),
            "rollout/servers_serving": float(self._loop.call(lambda: fleet.num_serving)),
        }
