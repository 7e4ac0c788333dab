"""Weights on their way to servers: number formats, buckets, directories, expected checksums."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_p3o.architecture import read_architecture
from megatron_p3o.errors import NonFiniteError
from megatron_p3o.types import WeightBucket
from megatron_p3o.weights import hf_tensors, param_rows
from megatron_p3o.weights.publish import (
    ServedFormat,
    ServerChecksums,
    VersionWriter,
    fill_buckets,
    served_tensors,
)
from megatron_p3o.weights.resharding.describe import read_config
from megatron_p3o.weights.resharding.values import same_bits
from tests.unit.reshard_models import make_model
from tests.unit.test_reshard import load_weights, run

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8)
SIZES = {"hidden_size": 160, "intermediate_size": 264, "num_hidden_layers": 2}


def trained(model_dir: Path) -> Iterator[tuple[str, Tensor]]:
    """A model directory's tensors in the order in which the trainer hands them out."""
    weights = load_weights(model_dir)
    architecture = read_architecture(model_dir)
    rows = {row.megatron: row for row in param_rows(architecture)}

    def gather(name: str) -> list[Tensor]:
        row = rows[name]
        return [row.layout.merge([weights[part] for part in row.hf])]

    return hf_tensors(architecture, gather)


def unpacked(bucket: WeightBucket) -> list[tuple[str, Tensor]]:
    """As a server reads it: by place, dtype and shape."""
    return [
        (e.name, bucket.data[e.start : e.stop].clone().view(e.dtype).view(e.shape))
        for e in bucket.entries
    ]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).view(shape)


def writer(destination: Path, model_dir: Path, served: ServedFormat) -> VersionWriter:
    return VersionWriter(
        destination,
        read_architecture(model_dir),
        served,
        config=read_config(model_dir),
        files=model_dir,
        held=torch.bfloat16,
    )


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 7), max_size=3), st.sampled_from(DTYPES)),
        min_size=1,
        max_size=25,
    ),
    st.integers(1, 400),
)
def test_buckets_carry_every_bit_once(
    tensors: list[tuple[list[int], torch.dtype]], max_bytes: int
) -> None:
    named = [
        (f"t{i}", random_tensor(tuple(shape), dtype)) for i, (shape, dtype) in enumerate(tensors)
    ]
    arrived: list[tuple[str, Tensor]] = []
    last: list[bool] = []
    for bucket in fill_buckets(iter(named), max_bytes):
        assert len(bucket.data) <= max_bytes or len(bucket.entries) == 1
        stops = [0, *(entry.stop for entry in bucket.entries)]
        assert [entry.start for entry in bucket.entries] == stops[:-1]
        assert all(entry.start % entry.dtype.itemsize == 0 for entry in bucket.entries)
        assert stops[-1] == len(bucket.data)
        arrived += unpacked(bucket)
        last.append(bucket.is_last)
    assert last == [False] * (len(last) - 1) + [True]
    assert sorted(name for name, _ in arrived) == sorted(name for name, _ in named)
    received = dict(arrived)
    assert all(same_bits(received[name], tensor) for name, tensor in named)


def test_buckets_are_filled_as_far_as_they_go() -> None:
    named = [(str(i), torch.full((10,), i, dtype=torch.uint8)) for i in range(7)]
    sizes = [len(bucket.data) for bucket in fill_buckets(iter(named), 35)]
    assert sizes == [30, 30, 10]
    named.insert(3, ("large", torch.zeros(100, dtype=torch.uint8)))
    sizes = [len(bucket.data) for bucket in fill_buckets(iter(named), 35)]
    assert sizes == [30, 100, 30, 10]


def test_buckets_share_one_buffer_and_hold_no_more_than_another() -> None:
    """What the stream may have handed out when a bucket comes: its tensors and one more."""
    asked = 0

    def stream() -> Iterator[tuple[str, Tensor]]:
        nonlocal asked
        for i in range(100):
            asked += 1
            yield str(i), torch.zeros(8, dtype=torch.uint8)

    places = set()
    for count, bucket in enumerate(fill_buckets(stream(), 32), start=1):
        places.add(bucket.data.data_ptr())
        assert asked == min(4 * count + 1, 100)
    assert len(places) == 1
    with pytest.raises(ValueError, match="without tensors"):
        next(fill_buckets(iter([]), 32))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_fp8_is_what_reshard_writes(family: str, tmp_path: Path) -> None:
    start = make_model(tmp_path / "start", family, **SIZES)
    expected = load_weights(run(start, tmp_path / "fp8", "hf", dtype="fp8-block"))
    served = ServedFormat(fp8=True)
    architecture = read_architecture(start)
    sent = dict(served_tensors(trained(start), architecture, served))
    assert sent.keys() == expected.keys()
    assert all(same_bits(sent[name], expected[name]) for name in expected)
    with writer(tmp_path / "published" / "version_3", start, served) as version:
        for name, tensor in sent.items():
            version.add(name, tensor)
        version.commit()
    for path in (tmp_path / "fp8").iterdir():
        copy = tmp_path / "published" / "version_3" / path.name
        assert copy.read_bytes() == path.read_bytes(), path.name
    assert [path.name for path in (tmp_path / "published").iterdir()] == ["version_3"]


def test_plain_tensors_are_cast_once_and_otherwise_left_alone(tmp_path: Path) -> None:
    start = make_model(tmp_path / "start", "llama", dtype=torch.float32)
    architecture, weights = read_architecture(start), load_weights(start)
    sent = dict(served_tensors(trained(start), architecture, ServedFormat()))
    assert all(same_bits(sent[name], weights[name]) for name in weights)
    half = dict(served_tensors(trained(start), architecture, ServedFormat(dtype=torch.bfloat16)))
    assert all(same_bits(half[name], weights[name].bfloat16()) for name in weights)


def test_bad_streams_are_refused(tmp_path: Path) -> None:
    start = make_model(tmp_path / "start", "qwen3", **SIZES)
    architecture = read_architecture(start)
    weight = torch.zeros(160, 160)
    weight[3, 5] = torch.nan
    stream = iter([("model.layers.0.self_attn.o_proj.weight", weight)])
    with pytest.raises(NonFiniteError, match=r"o_proj\.weight holds NaN"):
        list(served_tensors(stream, architecture, ServedFormat(fp8=True)))
    with pytest.raises(ValueError, match=r"model\.nothing has no row"):
        list(served_tensors([("model.nothing", weight)], architecture, ServedFormat()))


def test_an_unfinished_directory_leaves_nothing(tmp_path: Path) -> None:
    start = make_model(tmp_path / "start", "qwen3", **SIZES)
    destination = tmp_path / "published" / "version_1"
    with (
        pytest.raises(OSError, match="full"),
        writer(destination, start, ServedFormat()) as version,
    ):
        version.add(*next(trained(start)))
        raise OSError("the disk is full")
    assert not list(destination.parent.iterdir())


def sha(*parts: Tensor) -> str:
    flat = torch.cat([part.contiguous().reshape(-1).view(torch.uint8) for part in parts])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize(("heads", "size"), [(2, 1), (2, 2), (1, 2)])
def test_expected_checksums(heads: int, size: int, tmp_path: Path) -> None:
    """Against parameters put together by hand, on every tensor rank."""
    start = make_model(tmp_path / "start", "qwen3", num_key_value_heads=heads)
    w = load_weights(start)
    expected = ServerChecksums(read_architecture(start), size)
    for name, tensor in trained(start):
        expected.add(name, tensor)
    layer = "model.layers.0."
    ranks = []
    for rank in range(size):

        def rows(name: str, rank: int = rank) -> Tensor:
            return w[layer + name].chunk(size)[rank]

        key = w[layer + "self_attn.k_proj.weight"]
        value = w[layer + "self_attn.v_proj.weight"]
        if heads >= size:
            key, value = key.chunk(size)[rank], value.chunk(size)[rank]
        # A vocabulary of 101 rows is padded to 128.
        embedding = torch.cat([w["model.embed_tokens.weight"], torch.zeros(27, 32).bfloat16()])
        ranks.append(
            {
                layer + "self_attn.qkv_proj.weight": sha(
                    rows("self_attn.q_proj.weight"), key, value
                ),
                layer + "mlp.gate_up_proj.weight": sha(
                    rows("mlp.gate_proj.weight"), rows("mlp.up_proj.weight")
                ),
                layer + "mlp.down_proj.weight": sha(
                    w[layer + "mlp.down_proj.weight"].chunk(size, dim=1)[rank]
                ),
                layer + "self_attn.q_norm.weight": sha(w[layer + "self_attn.q_norm.weight"]),
                "model.embed_tokens.weight": sha(embedding.chunk(size)[rank]),
            }
        )
    report = expected.compare(ranks)
    assert report.num_equal == 5 * size
    assert not report.different
    assert any("layers.1.self_attn.qkv_proj" in name for name in report.absent)
    assert not report.is_proof
    ranks[-1]["model.embed_tokens.weight"] = "0" * 16
    different = expected.compare(ranks).different
    assert [name.split(" ")[0] for name in different] == ["model.embed_tokens.weight"]


def test_expected_checksums_of_fp8_are_those_of_the_product(tmp_path: Path) -> None:
    start = make_model(tmp_path / "start", "qwen3", hidden_size=128, intermediate_size=256)
    architecture = read_architecture(start)
    expected = ServerChecksums(architecture, 1)
    for name, tensor in served_tensors(trained(start), architecture, ServedFormat(fp8=True)):
        expected.add(name, tensor)
    fp8 = load_weights(run(start, tmp_path / "fp8", "hf", dtype="fp8-block"))
    name = "model.layers.0.mlp.down_proj.weight"
    scale = fp8[name + "_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    product = (fp8[name].float() * scale).bfloat16()
    assert expected.compare([{name: sha(product)}]).num_equal == 1


def test_models_whose_place_in_a_server_is_unknown(tmp_path: Path) -> None:
    for family, known in (("qwen2", True), ("qwen3_moe", False)):
        start = make_model(tmp_path / family, family)
        assert ServerChecksums.can_predict(read_architecture(start)) == known
