"""Round trips of weights: any format and layout to any other, bitwise."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_p3o.weights import ReshardOptions, TargetLayout, reshard
from tests.unit.reshard_models import make_model

DENSE = ["llama", "mistral", "qwen2", "qwen3", "glm4"]
MOE = ["mixtral", "qwen3_moe", "glm4_moe", "deepseek_v2", "deepseek_v3"]


def load_weights(directory: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def assert_same_model(one: Path, other: Path) -> None:
    ours, theirs = load_weights(one), load_weights(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), name
    configs = [json.loads((path / "config.json").read_text()) for path in (one, other)]
    assert configs[0] == configs[1]
    assert (other / "tokenizer.json").read_text() == (one / "tokenizer.json").read_text()


def run(source: Path, destination: Path, to: str, *, layout: Any = None, **options: Any) -> Path:
    reshard(
        source,
        destination,
        ReshardOptions(
            to=to,
            layout=layout or TargetLayout(),
            verify=True,
            **options,  # type: ignore[arg-type]
        ),
    )
    assert [path.name for path in destination.parent.iterdir() if path.name[0] == "."] == []
    return destination


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("tied", [False, True])
def test_every_format_in_turn_gives_back_the_model(tmp_path: Path, family: str, tied: bool) -> None:
    start = make_model(tmp_path / "start", family, tied=tied)
    dist = run(start, tmp_path / "dist", "torch_dist", layout=TargetLayout(tensor=2, pipeline=2))
    torch_dir = run(dist, tmp_path / "torch", "torch", layout=TargetLayout(tensor=4))
    assert_same_model(start, run(torch_dir, tmp_path / "end", "hf"))


@pytest.mark.parametrize("family", MOE)
def test_experts_come_back_in_their_order(tmp_path: Path, family: str) -> None:
    start = make_model(tmp_path / "start", family)
    layout = TargetLayout(tensor=2, pipeline=2, expert=2)
    dist = run(start, tmp_path / "dist", "torch_dist", layout=layout)
    torch_dir = run(dist, tmp_path / "torch", "torch", layout=TargetLayout(tensor=4))
    assert_same_model(start, run(torch_dir, tmp_path / "end", "hf"))


def test_hf_shards_and_index(tmp_path: Path) -> None:
    start = make_model(tmp_path / "start", "llama")
    end = run(start, tmp_path / "end", "hf", max_shard_bytes=20_000)
    index = json.loads((end / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in end.glob("*.safetensors"))
    assert len(files) > 3
    assert sorted(set(index["weight_map"].values())) == files
    total = sum(t.nbytes for t in load_weights(start).values())
    assert index["metadata"]["total_size"] == total
    assert_same_model(start, end)
    again = run(end, tmp_path / "again", "hf")
    assert [path.name for path in again.glob("*.safetensors")] == ["model.safetensors"]
    assert_same_model(start, again)
