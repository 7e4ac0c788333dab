"""Weights into real SGLang servers on the CPU, by every transport and through every fault."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_p3o.architecture import read_architecture
from megatron_p3o.rollout.sglang import (
    CallRefused,
    DistributedTransport,
    ServerControl,
    Target,
)
from megatron_p3o.trainer.publish import PublishedModel, Publisher, PublishOptions
from megatron_p3o.weights.publish import ServedFormat, fill_buckets
from megatron_p3o.weights.resharding.describe import read_config
from tests.integration.sglang_servers import Server, logprob_gap, save_qwen3
from tests.unit.test_publish import trained
from tests.unit.test_reshard import load_weights, run

PROMPT = [5, 6, 7, 8, 9, 100, 200, 300]
BUCKET_BYTES = 200_000


class OneRank:
    rank = 0
    device = torch.device("cpu")

    def broadcast_object(self, value: Any) -> Any:
        return value


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
        transport="tensor",
        directory=directory,
        bucket_bytes=BUCKET_BYTES,
        timeout_s=30,
        verify_every=1,
    )
    return Publisher(OneRank(), model, replace(chosen, **options))


@pytest.fixture(scope="module")
def server(servers: list[Server]) -> Server:
    return servers[0]


@pytest.mark.parametrize("transport", ["tensor", "distributed", "disk"])
def test_a_server_computes_with_the_published_weights(
    transport: str, server: Server, llama_models: list[Path], tmp_path: Path
) -> None:
    publish = publisher(llama_models[0], tmp_path, transport=transport)
    for version, which in ((1, 1), (2, 0)):
        report = publish.publish(trained(llama_models[which]), version, [control(server)])
        assert report.is_complete, report.failed
        assert report.acknowledged == (server.url,)
        assert report.verified
        assert report.nbytes == sum(t.nbytes for t in load_weights(llama_models[which]).values())
        assert control(server).weight_version() == str(version)
        assert logprob_gap(server, llama_models[which], PROMPT) < 5e-5
        assert logprob_gap(server, llama_models[1 - which], PROMPT) > 1e-2
    publish.close()
    assert [path.name for path in tmp_path.iterdir()] == ["version_2"] * (transport == "disk")


@pytest.mark.parametrize("interrupt", ["wait", "in_place", "retract", "abort"])
def test_running_requests_span_the_versions(
    interrupt: str, server: Server, llama_models: list[Path], tmp_path: Path
) -> None:
    publish = publisher(llama_models[0], tmp_path, interrupt=interrupt)
    assert publish.publish(trained(llama_models[0]), 10, [control(server)]).is_complete
    answers: list[dict[str, Any]] = []
    length = 40 if interrupt == "wait" else 600
    thread = threading.Thread(target=lambda: answers.append(server.generate(PROMPT, length)))
    thread.start()
    time.sleep(0.3)
    report = publish.publish(trained(llama_models[1]), 11, [control(server)])
    thread.join(60)
    assert report.is_complete, report.failed
    meta, tokens = answers[0]["meta_info"], len(answers[0]["output_ids"])
    spans = [(span["version"], span["start"], span["end"]) for span in meta["weight_versions"]]
    if interrupt in ("in_place", "retract"):
        assert tokens == length
        turn = spans[0][2]
        assert 0 < turn < length
        assert spans == [("10", 0, turn), ("11", turn, length)]
    else:
        assert spans == [("10", 0, tokens)]
        assert meta["finish_reason"]["type"] == ("abort" if interrupt == "abort" else "length")
        assert (tokens < length) == (interrupt == "abort")
    if interrupt == "in_place":
        control(server).flush_cache()  # of the old weights' prompt
    assert logprob_gap(server, llama_models[1], PROMPT) < 5e-5


def test_an_update_refused_half_way_is_reported_and_can_be_repeated(
    server: Server, llama_models: list[Path], tmp_path: Path
) -> None:
    publish = publisher(llama_models[0], tmp_path, transport="distributed")
    assert publish.publish(trained(llama_models[0]), 20, [control(server)]).is_complete

    def spoilt() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in trained(llama_models[1]):
            yield name, tensor[:-1] if name == "model.norm.weight" else tensor

    spoiling = publisher(
        llama_models[0], tmp_path / "spoilt", transport="distributed", verify_every=0
    )
    walked = spoilt()
    report = spoiling.publish(walked, 21, [control(server)])
    assert next(walked, None) is None
    assert not report.acknowledged
    assert [failed.url for failed in report.failed] == [server.url]
    assert "partially updated" in report.failed[0].reason
    assert control(server).weight_version() == "20"
    # Another publication makes it whole, though the session of this one is still open.
    report = publish.publish(trained(llama_models[1]), 22, [control(server)])
    assert report.is_complete, report.failed
    assert logprob_gap(server, llama_models[1], PROMPT) < 5e-5
    publish.close()


def test_a_server_that_never_joins_the_broadcast_does_not_hang_the_sender(
    server: Server, llama_models: list[Path]
) -> None:
    transport = DistributedTransport(torch.device("cpu"), timeout_s=60)
    target = Target(control=control(server), info=control(server).info())
    transport.connect(target)
    bucket = next(fill_buckets(trained(llama_models[0]), BUCKET_BYTES))
    started = time.monotonic()
    with pytest.raises(CallRefused, match="must run between"):
        transport.pack(bucket, target)(False, None)
    assert time.monotonic() - started < 5
    transport.forget(server.url)
    transport.connect(target)
    target.control.pause("in_place")
    target.control.begin_weight_update()
    transport.pack(bucket, target)(False, None)
    target.control.end_weight_update()
    target.control.continue_generation()
    transport.close()


def test_a_dead_server_leaves_the_others_and_comes_back_with_two_ranks(
    server: Server, llama_models: list[Path], tmp_path: Path
) -> None:
    second = Server(llama_models[0], tmp_path / "second").wait()
    try:
        both = [control(server), control(second)]
        publish = publisher(llama_models[0], tmp_path, transport="distributed")
        assert publish.publish(trained(llama_models[0]), 30, both).is_complete

        def dying() -> Iterator[tuple[str, Tensor]]:
            for count, item in enumerate(trained(llama_models[1])):
                if count == 12:
                    second.kill()
                yield item

        started = time.monotonic()
        report = publish.publish(dying(), 31, both)
        assert time.monotonic() - started < 30
        assert report.acknowledged == (server.url,)
        assert [failed.url for failed in report.failed] == [second.url]
        assert logprob_gap(server, llama_models[1], PROMPT) < 5e-5
    finally:
        second.kill()
    third = Server(llama_models[0], tmp_path / "third", ranks=2)
    try:
        third.wait()
        # Alone, at the version of the others.
        report = publish.publish(trained(llama_models[1]), 31, [control(third)])
        assert report.verified
        assert control(third).weight_version() == "31"
        assert logprob_gap(third, llama_models[1], PROMPT) < 5e-5
        version = 31
        for transport in ("distributed", "tensor"):
            fresh = publisher(llama_models[0], tmp_path / transport, transport=transport)
            for which in (0, 1):
                version += 1
                report = fresh.publish(
                    trained(llama_models[which]), version, [control(server), control(third)]
                )
                assert report.is_complete, report.failed
                assert report.verified
                assert logprob_gap(third, llama_models[which], PROMPT) < 5e-5
            fresh.close()
        publish.close()
    finally:
        third.kill()


def test_fp8_blocks_arrive_as_reshard_writes_them(tmp_path: Path) -> None:
    """A server holds the same bytes after an update as after loading the converted files."""
    models = [save_qwen3(tmp_path / f"qwen{seed}", seed) for seed in range(2)]
    fp8 = [run(m, tmp_path / f"{m.name}-fp8", "hf", dtype="fp8-block") for m in models]
    server = Server(models[0], tmp_path / "fp8", precision="fp8-block")
    try:
        server.wait()
        control(server).update_from_disk(str(fp8[0]), flush_cache=True, version="0")
        before = control(server).checksums()
        control(server).update_from_disk(str(fp8[1]), flush_cache=True, version="1")
        expected = control(server).checksums()
        assert expected != before
        for transport in ("tensor", "distributed", "disk"):
            control(server).update_from_disk(str(fp8[0]), flush_cache=True, version="2")
            assert control(server).checksums() == before
            directory = tmp_path / transport
            publish = publisher(
                models[0], directory, transport=transport, served=ServedFormat(fp8=True)
            )
            report = publish.publish(trained(models[1]), 3, [control(server)])
            assert report.is_complete, report.failed
            assert report.verified
            assert control(server).checksums() == expected
            publish.close()
        sent, written = report.nbytes, load_weights(fp8[1])
        assert sent == sum(tensor.nbytes for tensor in written.values())
    finally:
        server.kill()
