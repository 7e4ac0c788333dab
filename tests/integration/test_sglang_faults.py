"""Samples from real servers that fail in every way, one process apart from training."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_p3o.config import RunConfig
from megatron_p3o.errors import ConfigurationError, RunError
from megatron_p3o.rollout.sglang import (
    Cluster,
    GenerateOptions,
    LoopThread,
    RequestRefused,
    Response,
    ServerSet,
    managed_servers,
)
from megatron_p3o.rollout.sglang import Server as KnownServer
from megatron_p3o.trainer.publish import Publisher
from tests.integration.misbehaving import Proxy
from tests.integration.sglang_servers import Server, flags_of, run_config
from tests.integration.test_publish import PROMPT, publisher
from tests.unit.test_publish import trained

EOS = 1
NUM_SAMPLES = 12
# Of single tokens, nats; their mean is below 1e-5, and other weights are off by more than 1e-2.
MAX_GAP = 5e-5


def options(config: RunConfig) -> GenerateOptions:
    return GenerateOptions(sampling=config.sampling, eos_token_ids=(EOS,))


def cluster_of(server_set: ServerSet, config: RunConfig) -> Cluster:
    return Cluster(server_set, config.rollout, options(config), api_key=None, on_event=lambda: None)


async def publish(cluster: Cluster, publisher: Publisher, model: Path, version: int) -> None:
    """To all servers that answer, as the trainer does."""
    controls = cluster.fleet.begin_update(version, only_in_need=False)
    report = await asyncio.to_thread(publisher.publish, trained(model), version, controls)
    cluster.fleet.end_update(report, version)


async def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.05)


@cache
def transformers_model(model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def logprob_gap(response: Response, prompt: list[int], models: dict[int, Path]) -> float:
    """Greatest difference to transformers' log-probs under the version of each token (nats)."""
    tokens = prompt + response.token_ids
    gap = 0.0
    for version, start, stop in response.version_spans:
        model = transformers_model(models[version])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)
        for place in range(start, stop):
            row = len(prompt) + place
            expected = logprobs[row - 1, tokens[row]].item()
            gap = max(gap, abs(expected - response.logprobs[place]))
    return gap


@asynccontextmanager
async def proxied(
    servers: list[Server], config: RunConfig, publish_by: Publisher, model: Path
) -> AsyncIterator[tuple[Cluster, Proxy]]:
    """A cluster of servers, the first behind a proxy, all with version 1."""
    proxy = Proxy(servers[0].url)
    urls = [await proxy.start(), *(server.url for server in servers[1:])]
    known = tuple(KnownServer(url=url) for url in urls)
    cluster = cluster_of(ServerSet(servers=known, router=None), config)
    try:
        await cluster.start()
        await until(lambda: len(cluster.fleet.in_need()) == len(servers))
        await publish(cluster, publish_by, model, 1)
        yield cluster, proxy
    finally:
        await cluster.close()
        await proxy.close()


def drop_logprob(answer: dict[str, Any]) -> None:
    answer["meta_info"]["output_token_logprobs"].pop()


def other_token(answer: dict[str, Any]) -> None:
    answer["meta_info"]["output_token_logprobs"][0][1] += 1


def not_finite(answer: dict[str, Any]) -> None:
    answer["meta_info"]["output_token_logprobs"][0][0] = None


def positive(answer: dict[str, Any]) -> None:
    answer["meta_info"]["output_token_logprobs"][0][0] = 0.5


def too_short(answer: dict[str, Any]) -> None:
    answer["output_ids"].pop()
    answer["meta_info"]["output_token_logprobs"].pop()
    answer["meta_info"]["weight_versions"][-1]["end"] -= 1


def future_version(answer: dict[str, Any]) -> None:
    answer["meta_info"]["weight_versions"][0]["version"] = "99"


@pytest.mark.parametrize(
    "fault",
    [
        "500",
        "garbage",
        "truncated",
        drop_logprob,
        other_token,
        not_finite,
        positive,
        too_short,
        future_version,
    ],
    ids=str,
)
def test_a_spoilt_answer_is_made_again(
    fault: Any, servers: list[Server], llama_models: list[Path], tmp_path: Path
) -> None:
    config = run_config(llama_models[0], sampling={"max_new_tokens": 8})

    async def scenario() -> tuple[list[Response], int]:
        by = publisher(llama_models[0], tmp_path)
        async with proxied(servers, config, by, llama_models[0]) as (cluster, proxy):
            proxy.fault, proxy.num_faults = fault, 2
            responses = await asyncio.gather(
                *(cluster.sampler.sample(str(i), PROMPT, 8) for i in range(NUM_SAMPLES))
            )
            assert proxy.num_faults == 0
            return responses, cluster.sampler.num_retries

    responses, num_retries = asyncio.run(scenario())
    assert num_retries == 2
    assert len(responses) == NUM_SAMPLES
    for response in responses:
        assert response.finish_reason == "stop" or len(response.token_ids) == 8
        assert logprob_gap(response, PROMPT, {1: llama_models[0]}) < MAX_GAP


def test_a_server_that_keeps_failing_is_taken_out_and_comes_back(
    servers: list[Server], llama_models: list[Path], tmp_path: Path
) -> None:
    config = run_config(llama_models[0], sampling={"max_new_tokens": 8})

    async def scenario() -> None:
        by = publisher(llama_models[0], tmp_path)
        async with proxied(servers, config, by, llama_models[0]) as (cluster, proxy):
            proxy.fault, proxy.num_faults = "500", 1000
            samples = [cluster.sampler.sample(str(i), PROMPT, 8) for i in range(NUM_SAMPLES)]
            assert len(await asyncio.gather(*samples)) == NUM_SAMPLES
            assert cluster.fleet.serving_urls() == [servers[1].url]
            assert proxy.num_faults > 1000 - NUM_SAMPLES  # it was not asked again and again
            proxy.num_faults = 0
            await publish(cluster, by, llama_models[1], 2)
            assert cluster.fleet.num_serving == 2
            response = await cluster.sampler.sample("x", PROMPT, 8)
            assert logprob_gap(response, PROMPT, {2: llama_models[1]}) < MAX_GAP

    asyncio.run(scenario())


def test_servers_that_keep_refusing_weights_stop_the_run(
    servers: list[Server],
    llama_models: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatron_p3o.rollout.sglang.fleet._UPDATE_RETRY_S", 0.2)
    config = run_config(llama_models[0], rollout={"engine": "sglang", "outage_timeout_s": 3.0})

    async def scenario() -> tuple[int, Exception]:
        by = publisher(llama_models[0], tmp_path)
        num_refused = 0
        async with proxied(servers[:1], config, by, llama_models[0]) as (cluster, proxy):
            fleet = cluster.fleet
            assert fleet.problem() is None
            proxy.refuses_weights = True
            await publish(cluster, by, llama_models[1], 2)
            while (problem := fleet.problem()) is None:
                if fleet.in_need():
                    num_refused += 1
                    await publish(cluster, by, llama_models[1], 2)
                await asyncio.sleep(0.05)
        return num_refused, problem

    num_refused, problem = asyncio.run(scenario())
    assert num_refused >= 3
    assert "no rollout server could serve for rollout.outage_timeout_s=3 s" in str(problem)


def test_a_silent_request_is_given_up_at_its_deadline(
    servers: list[Server], llama_models: list[Path], tmp_path: Path
) -> None:
    config = run_config(
        llama_models[0],
        sampling={"max_new_tokens": 8},
        rollout={"engine": "sglang", "request_timeout_s": 4.0},
    )

    async def scenario() -> Response:
        by = publisher(llama_models[0], tmp_path)
        async with proxied(servers, config, by, llama_models[0]) as (cluster, proxy):
            proxy.fault, proxy.num_faults = "silent", 1
            return await cluster.sampler.sample("x", PROMPT, 8)

    assert logprob_gap(asyncio.run(scenario()), PROMPT, {1: llama_models[0]}) < MAX_GAP


def test_a_sample_that_fails_everywhere_stops_the_run(
    servers: list[Server], llama_models: list[Path], tmp_path: Path
) -> None:
    config = run_config(llama_models[0], rollout={"engine": "sglang", "max_attempts": 2})

    async def scenario() -> None:
        by = publisher(llama_models[0], tmp_path)
        async with proxied(servers[:1], config, by, llama_models[0]) as (cluster, proxy):
            proxy.fault, proxy.num_faults = "garbage", 1000
            with pytest.raises(RunError, match=r"sample 3/1 failed rollout.max_attempts=2 times"):
                await cluster.sampler.sample("3/1", PROMPT, 8)

    asyncio.run(scenario())


def test_a_wrong_request_is_refused_at_once(
    servers: list[Server], llama_models: list[Path], tmp_path: Path
) -> None:
    config = run_config(llama_models[0])

    async def scenario() -> None:
        by = publisher(llama_models[0], tmp_path)
        async with proxied(servers, config, by, llama_models[0]) as (cluster, _):
            with pytest.raises(RequestRefused, match="refused a prompt of 8 tokens"):
                await cluster.sampler.sample("x", PROMPT, 100_000)
            assert cluster.sampler.num_retries == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_logprobs_are_of_logits_over_temperature(
    temperature: float, servers: list[Server], llama_models: list[Path], tmp_path: Path
) -> None:
    sampling = {"temperature": temperature, "max_new_tokens": 24}
    config = run_config(llama_models[0], sampling=sampling)

    async def scenario() -> list[tuple[int, Response]]:
        by = publisher(llama_models[0], tmp_path)
        found = []
        async with proxied(servers, config, by, llama_models[0]) as (cluster, _):
            for version in (1, 2):
                await publish(cluster, by, llama_models[version - 1], version)
                found += [
                    (version, await cluster.sampler.sample(str(i), PROMPT, 24)) for i in range(4)
                ]
        return found

    for version, response in asyncio.run(scenario()):
        model = transformers_model(llama_models[version - 1])
        tokens = PROMPT + response.token_ids
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0]
        logprobs = torch.log_softmax(logits / temperature, -1)
        expected = logprobs[range(len(PROMPT) - 1, len(tokens) - 1), response.token_ids]
        gaps = (torch.tensor(response.logprobs) - expected).abs()
        assert gaps.mean() < 1e-5
        assert gaps.max() < MAX_GAP


@pytest.mark.parametrize("interrupt", ["retract", "abort"])
def test_every_token_of_an_interrupted_sample_has_the_logprob_of_its_version(
    interrupt: str, servers: list[Server], llama_models: list[Path], tmp_path: Path
) -> None:
    config = run_config(llama_models[0], rollout={"engine": "sglang", "interrupt": interrupt})

    async def scenario() -> tuple[list[Response], int]:
        by = publisher(llama_models[0], tmp_path, interrupt=interrupt)
        async with proxied(servers, config, by, llama_models[0]) as (cluster, _):
            tasks = [
                asyncio.create_task(cluster.sampler.sample(str(i), PROMPT, 500)) for i in range(4)
            ]
            await asyncio.sleep(0.5)
            await publish(cluster, by, llama_models[1], 2)
            return await asyncio.gather(*tasks), cluster.sampler.num_continued

    responses, num_continued = asyncio.run(scenario())
    spanning = [r for r in responses if len(r.version_spans) == 2]
    assert spanning
    assert (num_continued > 0) == (interrupt == "abort")
    for response in responses:
        assert len(response.token_ids) == len(response.logprobs)
        assert len(response.token_ids) == 500 or response.token_ids[-1] == EOS
        models = {1: llama_models[0], 2: llama_models[1]}
        assert logprob_gap(response, PROMPT, models) < MAX_GAP


class Watched:
    """Two managed servers with a cluster, driven from outside its loop."""

    def __init__(self, model_dir: Path, directory: Path) -> None:
        rollout = {
            "engine": "sglang",
            "probe_every_s": 0.5,
            "probe_timeout_s": 3.0,
            "launch": {"replicas": 2, "router": True},
        }
        self.config = run_config(model_dir, rollout=rollout)
        self.by = publisher(model_dir, directory / "weights")
        self.model_dir = model_dir
        self.server_set = managed_servers(flags_of(self.config, directory))
        self.loop = LoopThread("test")
        self.cluster = self.loop.call(lambda: cluster_of(self.server_set, self.config))
        self.loop.run(self.cluster.start())
        self.is_closed = False

    def run(self, coroutine: Any) -> Any:
        return self.loop.run(coroutine)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.loop.run(self.cluster.close())
            self.loop.close()


@pytest.fixture(scope="module")
def watched(
    llama_models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    one = Watched(llama_models[0], tmp_path_factory.mktemp("watched"))
    try:
        fleet = one.cluster.fleet
        one.run(until(lambda: len(fleet.in_need()) == 2))
        one.run(publish(one.cluster, one.by, one.model_dir, 1))
        one.run(until(lambda: fleet._router_is_up))
        yield one
    finally:
        one.close()


def server_pids(process: Any) -> list[psutil.Process]:
    return psutil.Process(process._process.pid).children(recursive=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_server_costs_no_sample_and_comes_back(
    number: signal.Signals, watched: Watched, llama_models: list[Path]
) -> None:
    """Killed, or hanging, in the middle of generations."""
    cluster, fleet = watched.cluster, watched.cluster.fleet
    victim = watched.server_set.servers[0]
    restarts = fleet.num_restarts

    async def scenario() -> list[Response]:
        tasks = [asyncio.create_task(cluster.sampler.sample(str(i), PROMPT, 400)) for i in range(8)]
        await until(lambda: fleet._places[victim.url].in_flight > 0)
        await asyncio.sleep(0.5)  # into the middle of their generation
        for process in server_pids(victim.process):
            os.kill(process.pid, number)
        responses = await asyncio.gather(*tasks)
        await until(lambda: bool(fleet.in_need()))
        assert fleet.num_serving == 1
        controls = fleet.begin_update(fleet.version, only_in_need=True)
        assert [control.url for control in controls] == [victim.url]
        version = fleet.version
        model = llama_models[version - 1]
        report = await asyncio.to_thread(watched.by.publish, trained(model), version, controls)
        fleet.end_update(report, version)
        assert report.verified
        assert fleet.num_serving == 2
        return responses

    responses = watched.run(scenario())
    assert fleet.num_restarts == restarts + 1
    assert len(responses) == 8
    assert len({tuple(response.token_ids) for response in responses}) == 8
    models = {1: llama_models[0], 2: llama_models[1]}
    for response in responses:
        assert len(response.token_ids) == 400 or response.token_ids[-1] == EOS
        assert logprob_gap(response, PROMPT, models) < MAX_GAP


def test_samples_go_on_while_the_router_is_away(watched: Watched) -> None:
    cluster, fleet = watched.cluster, watched.cluster.fleet
    assert watched.server_set.router is not None
    url, process = watched.server_set.router
    assert process is not None

    async def scenario() -> list[Response]:
        await until(lambda: fleet._router_is_up)
        place = next(iter(fleet._places.values()))
        assert fleet.entry(place) == url
        started = process.num_starts
        for child in server_pids(process):
            os.kill(child.pid, signal.SIGKILL)
        samples = [cluster.sampler.sample(str(i), PROMPT, 16) for i in range(6)]
        responses = await asyncio.gather(*samples)
        await until(lambda: fleet._router_is_up and process.num_starts == started + 1)
        return responses

    assert len(watched.run(scenario())) == 6


def test_closing_leaves_no_process_no_port_and_no_thread(watched: Watched) -> None:
    """Runs last: it ends the module's servers."""
    processes = [s.process for s in watched.server_set.servers]
    pids = [child for process in processes for child in server_pids(process)]
    assert len(pids) >= 2
    assert "test" in {thread.name for thread in threading.enumerate()}
    watched.close()
    alive = [p for p in pids if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert alive == []
    ports = {int(server.url.rpartition(":")[2]) for server in watched.server_set.servers}
    # Another program may have been given the port since.
    listening = [c for c in psutil.net_connections("tcp") if c.status == "LISTEN"]
    holders = [c.pid for c in listening if c.laddr.port in ports and c.pid is not None]
    assert [p for p in holders if "sglang" in " ".join(psutil.Process(p).cmdline())] == []
    assert "test" not in {thread.name for thread in threading.enumerate()}


def test_an_untested_version_is_refused_unless_allowed(
    servers: list[Server], llama_models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_p3o.rollout.sglang.supervisor.TESTED_VERSIONS", ("0.0.1",))

    async def problem(is_allowed: bool) -> Exception | None:
        config = run_config(
            llama_models[0],
            rollout={"engine": "sglang", "allow_untested_version": is_allowed},
        )
        known = (KnownServer(url=servers[0].url),)
        cluster = cluster_of(ServerSet(servers=known, router=None), config)
        try:
            await cluster.start()
            fleet = cluster.fleet
            await until(lambda: fleet.fatal is not None or bool(fleet.in_need()))
            return fleet.fatal
        finally:
            await cluster.close()

    refused = asyncio.run(problem(False))
    assert isinstance(refused, ConfigurationError)
    assert "runs SGLang 0.5.23" in str(refused) and "0.0.1" in str(refused)
    assert asyncio.run(problem(True)) is None


def test_a_server_that_cannot_start_is_told_with_its_last_words(
    llama_models: list[Path], tmp_path: Path
) -> None:
    launch = {"replicas": 1, "args": ["--no-such-flag"]}
    config = run_config(llama_models[0], rollout={"engine": "sglang", "launch": launch})

    async def scenario() -> RunError:
        cluster = cluster_of(managed_servers(flags_of(config, tmp_path)), config)
        try:
            await cluster.start()
            await until(lambda: cluster.fleet.fatal is not None)
            problem = cluster.fleet.problem()
            assert isinstance(problem, RunError)
            return problem
        finally:
            await cluster.close()

    started = time.monotonic()
    message = str(asyncio.run(scenario()))
    assert "server 0 did not start: it ended with exit code 2" in message
    assert "server_0.log" in message and "--no-such-flag" in message
    assert time.monotonic() - started < 100
