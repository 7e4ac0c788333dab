"""Bad checkpoints, bad options and interruptions: a clear error, no DST, SRC untouched."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_p3o.errors import ConfigurationError, InputError, UserError
from megatron_p3o.weights import ReshardOptions, TargetLayout, reshard
from megatron_p3o.weights.resharding import run as run_module
from megatron_p3o.weights.resharding.console import parse_chunk_layers, parse_size
from tests.unit.reshard_models import make_model
from tests.unit.test_reshard import assert_same_model, run

FORMATS = ("hf", "torch_dist", "torch")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model in every format; tests damage copies."""
    root = tmp_path_factory.mktemp("sources")
    start = make_model(root / "hf", "llama", num_hidden_layers=2)
    layout = TargetLayout(tensor=2)
    return {
        "hf": start,
        "torch_dist": run(start, root / "torch_dist", "torch_dist", layout=layout),
        "torch": run(start, root / "torch", "torch", layout=layout),
    }


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors")


def truncate(path: Path, by: int = 100) -> None:
    os.truncate(path, path.stat().st_size - by)


def edit_rank(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = directory / "release" / "mp_rank_01" / "model_optim_rng.pt"
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(path, weights_only=True)
    change(content["model"])
    torch.save(content, path)


def with_evil_object(directory: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(directory / "evil"),)

    torch.save({"model": {}, "x": Evil()}, directory / "release/mp_rank_01/model_optim_rng.pt")


class Damage(NamedTuple):
    kind: str
    damage: Callable[[Path], Any]
    message: str


DAMAGES = {
    "no config": Damage("hf", lambda d: (d / "config.json").unlink(), "no known checkpoint"),
    "no weights": Damage("hf", lambda d: (d / "model.safetensors").unlink(), "safetensors"),
    "truncated hf": Damage("hf", lambda d: truncate(d / "model.safetensors"), "half-written"),
    "family": Damage("hf", lambda d: edit_config(d, model_type="bert"), "'bert' is not supported"),
    "size missing": Damage("hf", lambda d: edit_config(d, hidden_size=None), "hidden_size=None"),
    "shape": Damage(
        "hf", lambda d: edit_config(d, intermediate_size=40), r"shape \[48, 32\].*calls for \[40"
    ),
    "tensor missing": Damage(
        "hf",
        lambda d: edit_weights(d, lambda w: w.pop("model.norm.weight")),
        r"lack model\.norm\.weight",
    ),
    "unknown tensor": Damage(
        "hf",
        lambda d: edit_weights(d, lambda w: w.update({"adapter.weight": torch.zeros(2)})),
        r"hold adapter\.weight, which has no place",
    ),
    "odd bias": Damage(
        "hf",
        lambda d: edit_weights(
            d, lambda w: w.update({"model.layers.0.self_attn.o_proj.bias": torch.zeros(32)})
        ),
        r"o_proj\.bias, which has no place",
    ),
    "mixed dtypes": Damage(
        "hf",
        lambda d: edit_weights(
            d,
            lambda w: w.update({"model.layers.0.self_attn.q_proj.weight": torch.zeros(32, 32)}),
        ),
        "several dtypes",
    ),
    "quantization": Damage(
        "hf",
        lambda d: edit_config(d, quantization_config={"quant_method": "awq"}),
        "quant_method='awq'.*not supported",
    ),
    "dist file missing": Damage(
        "torch_dist", lambda d: (d / "__1_0.distcp").unlink(), r"__1_0\.distcp is missing"
    ),
    "dist truncated": Damage(
        "torch_dist", lambda d: truncate(d / "__1_0.distcp"), r"__1_0\.distcp has \d+ bytes of"
    ),
    "dist metadata": Damage(
        "torch_dist", lambda d: truncate(d / ".metadata"), "pickle that cannot be read"
    ),
    "dist backend": Damage(
        "torch_dist",
        lambda d: (d / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        "sharded_backend='zarr'",
    ),
    "dist layers": Damage(
        "torch_dist", lambda d: edit_config(d / "hf", num_hidden_layers=1), "stacks 2 layers"
    ),
    "dist shapes": Damage(
        "torch_dist", lambda d: edit_config(d / "hf", hidden_size=64), r"calls for .*64"
    ),
    "dist family": Damage(
        "torch_dist", lambda d: edit_config(d / "hf", model_type="qwen2"), "lacks .*linear_qkv.bias"
    ),
    "dist config": Damage(
        "torch_dist",
        lambda d: shutil.rmtree(d / "hf"),
        "does not say what model it holds.*--config",
    ),
    "torch rank missing": Damage(
        "torch", lambda d: shutil.rmtree(d / "release/mp_rank_00"), "hold 1 of 2 shards"
    ),
    "torch file missing": Damage(
        "torch",
        lambda d: (d / "release/mp_rank_01/model_optim_rng.pt").unlink(),
        r"mp_rank_01' lacks model_optim_rng\.pt",
    ),
    "torch truncated": Damage(
        "torch",
        lambda d: truncate(d / "release/mp_rank_01/model_optim_rng.pt"),
        "not an archive of torch.save",
    ),
    "torch tensor missing": Damage(
        "torch",
        lambda d: edit_rank(d, lambda m: m.pop("decoder.layers.1.mlp.linear_fc2.weight")),
        "hold 1 of 2 shards",
    ),
    "torch unknown": Damage(
        "torch",
        lambda d: edit_rank(d, lambda m: m.update({"decoder.extra": torch.zeros(1)})),
        r"decoder\.extra, which has no place",
    ),
    "torch layers": Damage(
        "torch", lambda d: edit_config(d / "hf", num_hidden_layers=3), "hold 2 layers.*has 3"
    ),
    "torch pickle": Damage("torch", with_evil_object, r"posix\.mkdir.*--unsafe-pickle"),
    "tracker": Damage(
        "torch",
        lambda d: (d / "latest_checkpointed_iteration.txt").write_text("12"),
        "'iter_0000012' is missing",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_nothing_is_written(
    tmp_path: Path, sources: dict[str, Path], name: str
) -> None:
    kind, damage, message = DAMAGES[name]
    source = shutil.copytree(sources[kind], tmp_path / "source")
    damage(source)
    with pytest.raises(InputError, match=message):
        reshard(source, tmp_path / "end", ReshardOptions(to="hf"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert not (source / "evil").exists()


@pytest.mark.parametrize("kind", FORMATS)
def test_nan_and_infinity_are_counted(tmp_path: Path, sources: dict[str, Path], kind: str) -> None:
    start = shutil.copytree(sources["hf"], tmp_path / "start")

    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.1.mlp.up_proj.weight"][3, :2] = float("nan")
        weights["model.layers.0.self_attn.k_proj.weight"][1, 1] = float("-inf")
        weights["lm_head.weight"][7, 7] = float("inf")

    edit_weights(start, spoil)
    source = start
    if kind != "hf":
        source = run(start, tmp_path / kind, kind, allow_nonfinite=True)
    with pytest.raises(InputError, match=r"4 NaN or infinite.*linear_fc1.*--allow-nonfinite"):
        reshard(source, tmp_path / "end", ReshardOptions(to="hf"))
    assert not (tmp_path / "end").exists()
    assert_same_model(start, run(source, tmp_path / "end", "hf", allow_nonfinite=True))
    with pytest.raises(InputError, match="FP8 blocks cannot express"):
        run(source, tmp_path / "fp8", "hf", allow_nonfinite=True, dtype="fp8-block")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ReshardOptions(to="gguf"), "--to=gguf must be one of hf, torch_dist, torch"),
        (ReshardOptions(to="hf", dtype="int4"), "--dtype=int4 must be one of keep"),
        (ReshardOptions(to="torch", names="x"), "--names=x must be one of te, local"),
        (ReshardOptions(to="torch", dtype="fp8-block"), "--dtype=fp8-block with --to=torch"),
        (ReshardOptions(to="hf", layout=TargetLayout(tensor=2)), "--tp.*leave them out"),
        (ReshardOptions(to="hf", workers=0), "--workers=0 must be >= 1"),
        (ReshardOptions(to="hf", max_shard_bytes=0), "--max-shard-size=0 must be above 0"),
    ],
    ids=str,
)
def test_bad_options(
    tmp_path: Path, sources: dict[str, Path], options: ReshardOptions, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        reshard(sources["hf"], tmp_path / "end", options)
    assert not list(tmp_path.iterdir())


def test_latent_attention_of_local_layers(tmp_path: Path) -> None:
    start = make_model(tmp_path / "start", "deepseek_v3", num_hidden_layers=2)
    options = ReshardOptions(to="torch", names="local", layout=TargetLayout(tensor=2))
    with pytest.raises(ConfigurationError, match="use --names te"):
        reshard(start, tmp_path / "end", options)


def test_sizes_and_lists_in_words() -> None:
    assert [parse_size(text) for text in ("5GB", "1.5 mb", "700", "2K")] == [
        5 * 10**9,
        1_500_000,
        700,
        2000,
    ]
    assert parse_chunk_layers("3,5, 4") == (3, 5, 4)
    for bad in ("5 apples", "-1GB", ""):
        with pytest.raises(ConfigurationError, match="use 5GB"):
            parse_size(bad)
    with pytest.raises(ConfigurationError, match="use 3,5,4,4"):
        parse_chunk_layers("3,x")


def test_destinations_that_would_lose_something(
    tmp_path: Path, sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shutil.copytree(sources["hf"], tmp_path / "source")
    options = ReshardOptions(to="hf")
    with pytest.raises(InputError, match="already exists"):
        reshard(source, source, options)
    with pytest.raises(InputError, match="lies in SRC"):
        reshard(source, source / "below", options)
    with pytest.raises(InputError, match="not a directory"):
        reshard(tmp_path / "absent", tmp_path / "end", options)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(run_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(InputError, match=r"needs \d+ bytes.* has 1000 free"):
        reshard(source, tmp_path / "end", options)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_verify_finds_a_bit_that_was_written_wrong(
    tmp_path: Path, sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that flips a bit after the write, in a file of each format."""
    verify = run_module._verify

    def flip_then_verify(source: Any, directory: Path, *rest: Any) -> None:
        file = max(directory.rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        verify(source, directory, *rest)

    monkeypatch.setattr(run_module, "_verify", flip_then_verify)
    for kind in FORMATS:
        with pytest.raises(UserError, match="read back different"):
            reshard(sources["hf"], tmp_path / "end", ReshardOptions(to=kind, verify=True))
    assert not list(tmp_path.iterdir())


def test_an_error_in_the_middle_leaves_nothing(
    tmp_path: Path, sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []

    def interrupt(what: str, now: int, total: int) -> None:
        done.append(now)
        if len(done) == 4:
            raise KeyboardInterrupt

    before = {path: path.read_bytes() for path in sources["hf"].iterdir()}
    with pytest.raises(KeyboardInterrupt):
        reshard(sources["hf"], tmp_path / "end", ReshardOptions(to="torch", workers=1), interrupt)
    assert not list(tmp_path.iterdir())
    assert before == {path: path.read_bytes() for path in sources["hf"].iterdir()}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_leaves_no_destination(tmp_path: Path, number: signal.Signals) -> None:
    """While it writes. Ctrl-C leaves nothing; after a kill what is there has a hidden name."""
    code = (
        "import sys, time; from megatron_p3o.weights import ReshardOptions, reshard\n"
        "def slow(what, done, total):\n"
        "    print('step', flush=True); time.sleep(0.2)\n"
        "reshard(sys.argv[1], sys.argv[2], ReshardOptions(to='torch_dist', workers=1), slow)"
    )
    start = make_model(tmp_path / "start", "llama")
    end = tmp_path / "end"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(start), str(end)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline() == "step\n"
    process.send_signal(number)
    process.wait(timeout=30)
    time.sleep(0.1)
    left = {path.name for path in tmp_path.iterdir()} - {"start"}
    assert all(name.startswith(".end.") for name in left)
    assert len(left) == (number == signal.SIGKILL)
    run(start, tmp_path / "x" / "end", "torch_dist")
    assert_same_model(start, run(tmp_path / "x" / "end", tmp_path / "y" / "back", "hf"))
