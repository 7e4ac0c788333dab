"""Weights into real SGLang servers on the CPU by every transport, and what happens when it fails."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_p3o.architecture import read_architecture
from megatron_p3o.rollout.sglang import (
    ServerControl,
)
from megatron_p3o.trainer.publish import PublishedModel, Publisher, PublishOptions
from megatron_p3o.weights.publish import ServedFormat
from megatron_p3o.weights.resharding.describe import read_config
from tests.integration.sglang_servers import Server, logprob_gap, save_llama
from tests.unit.test_publish import trained
from tests.unit.test_reshard import load_weights

PROMPT = [5, 6, 7, 8, 9, 100, 200, 300]
BUCKET_BYTES = 200_000


class OneRank:
    rank = 0
    device = torch.device("cpu")

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]


def control(server: Server) -> ServerControl:
    return ServerControl(server.url, call_timeout_s=20, update_timeout_s=30)


def publisher(model_dir: Path, directory: Path, **options: Any) -> Publisher:
    served = options.pop("served", ServedFormat(dtype=torch.float32))
    model = PublishedModel(
        architecture=read_architecture(model_dir),
        served=served,
        held=torch.float32,
        config=read_config(model_dir),
        files=model_dir,
    )
    chosen = PublishOptions(
        transport="tensor", directory=directory, bucket_bytes=BUCKET_BYTES, timeout_s=30
    )
    return Publisher(OneRank(), model, replace(chosen, verify_every=1, **options))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape."""
    root = tmp_path_factory.mktemp("llama")
    return [save_llama(root / str(seed), seed) for seed in range(2)]


@pytest.fixture(scope="module")
def server(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Starts with model 0."""
    one = Server(models[0], tmp_path_factory.mktemp("log") / "server.log")
    try:
        yield one.wait()
    finally:
        one.kill()


@pytest.mark.parametrize("transport", ["tensor", "distributed", "disk"])
def test_a_server_computes_with_the_published_weights(
    transport: str, server: Server, models: list[Path], tmp_path: Path
) -> None:
    publish = publisher(models[0], tmp_path, transport=transport)
    for version, which in ((1, 1), (2, 0)):
        report = publish.publish(trained(models[which]), version, [control(server)])
        assert report.is_complete, report.failed
        assert report.acknowledged == (server.url,)
        assert report.verified
        assert report.nbytes == sum(t.nbytes for t in load_weights(models[which]).values())
        assert control(server).weight_version() == str(version)
        assert logprob_gap(server, models[which], PROMPT) < 1e-5
        assert logprob_gap(server, models[1 - which], PROMPT) > 1e-2
    publish.close()
    assert [path.name for path in tmp_path.iterdir()] == ["version_2"] * (transport == "disk")


@pytest.mark.parametrize("interrupt", ["wait", "in_place", "retract", "abort"])
def test_running_requests_span_the_versions(
    interrupt: str, server: Server, models: list[Path], tmp_path: Path
) -> None:
    publish = publisher(models[0], tmp_path, interrupt=interrupt)
    assert publish.publish(trained(models[0]), 10, [control(server)]).is_complete
    answers: list[dict[str, Any]] = []
    length = 40 if interrupt == "wait" else 150
    thread = threading.Thread(target=lambda: answers.append(server.generate(PROMPT, length)))
    thread.start()
    time.sleep(0.3)
    report = publish.publish(trained(models[1]), 11, [control(server)])
    thread.join(60)
    assert report.is_complete, report.failed
    meta = answers[0]["meta_info"]
    tokens = len(answers[0]["output_ids"])
    spans = meta.get("weight_versions")
    if interrupt == "wait":
        assert tokens == length
        assert meta["weight_version"] == "10" or spans is None
    elif interrupt == "abort":
        assert meta["finish_reason"]["type"] == "abort"
        assert 0 < tokens < length
    else:
        assert tokens == length
        assert {span["version"] if isinstance(span, dict) else span for span in spans}
    print(interrupt, meta["finish_reason"], meta.get("weight_version"), spans)
    assert logprob_gap(server, models[1], PROMPT) < 1e-5
