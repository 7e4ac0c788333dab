"""Speed and memory of `p3o reshard` against copying the same files.

    python benchmarks/reshard.py --directory /tmp/reshard-bench [--gigabytes 6] [--workers 2]

Makes a random checkpoint like Qwen3-4B (its layers, fewer or more of them to reach the size) and
runs, each in a process of its own: `cp -r`, a plain safetensors load and save, and the tool in
every direction. Before each run the files are written back to disk, and each destination is removed
after it. Prints a Markdown table: seconds with the final sync, GB/s of the source's bytes, peak
resident memory. The directory needs four times the size; it is removed at the end.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from megatron_p3o.weights import ReshardOptions, TargetLayout, param_rows, reshard
from megatron_p3o.weights.resharding.describe import describe_model

SHARD_BYTES = 1_000_000_000
SIZES: dict[str, Any] = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}


def make_checkpoint(directory: Path, gigabytes: float) -> int:
    """Write random bf16 weights in shards; returns their bytes."""
    directory.mkdir(parents=True)
    layer_bytes = 201_000_000
    fixed = 2 * SIZES["vocab_size"] * SIZES["hidden_size"]
    num_layers = max(1, round((gigabytes * 1e9 - fixed) / layer_bytes))
    config = Qwen3Config(num_hidden_layers=num_layers, dtype="bfloat16", **SIZES)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(directory)
    rows = param_rows(describe_model(config.to_dict(), "benchmark"))
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    total = held = 0

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(shard, directory / name)
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    for row in rows:
        for name, shape in row.hf.items():
            shard[name] = torch.randn(shape, dtype=torch.float32).bfloat16()
            held += shard[name].nbytes
            total += shard[name].nbytes
            if held > SHARD_BYTES:
                flush()
                held = 0
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def copy_files(source: Path, destination: Path, workers: int) -> None:
    subprocess.run(["cp", "-r", str(source), str(destination)], check=True)
    subprocess.run(["sync", "-f", str(destination)], check=True)


def load_and_save(source: Path, destination: Path, workers: int) -> None:
    destination.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        save_file(tensors, destination / path.name)
    subprocess.run(["sync", "-f", str(destination)], check=True)


def reshard_to(kind: str, layout: TargetLayout, dtype: str = "keep") -> Callable[..., None]:
    def run(source: Path, destination: Path, workers: int) -> None:
        options = ReshardOptions(to=kind, layout=layout, workers=workers, dtype=dtype)
        reshard(source, destination, options)

    return run


CUT = TargetLayout(tensor=2, pipeline=1)
WHOLE = TargetLayout()
RUNS: dict[str, tuple[str, Callable[..., None], bool]] = {
    # name: (source, what is done, whether its result is the source of later runs)
    "cp -r": ("hf", copy_files, False),
    "safetensors load + save": ("hf", load_and_save, False),
    "hf -> hf": ("hf", reshard_to("hf", WHOLE), False),
    "hf -> hf, FP8 blocks": ("hf", reshard_to("hf", WHOLE, "fp8-block"), False),
    "hf -> torch_dist (tp 2)": ("hf", reshard_to("torch_dist", CUT), True),
    "torch_dist -> hf": ("hf -> torch_dist (tp 2)", reshard_to("hf", WHOLE), False),
    "torch_dist -> torch (tp 4)": (
        "hf -> torch_dist (tp 2)",
        reshard_to("torch", TargetLayout(tensor=4)),
        True,
    ),
    "torch -> hf": ("torch_dist -> torch (tp 4)", reshard_to("hf", WHOLE), False),
    "hf -> torch (tp 2)": ("hf", reshard_to("torch", CUT), False),
}


def path_of(directory: Path, name: str) -> Path:
    return directory / "".join(c if c.isalnum() else "_" for c in name)


def measure(directory: Path, name: str, workers: int) -> tuple[float, float]:
    """(seconds, peak resident MB) of one run in a process of its own."""
    words = ["--directory", str(directory), "--run", name, "--workers", str(workers)]
    result = subprocess.run(
        [sys.executable, __file__, *words], capture_output=True, text=True, check=True
    )
    seconds, peak = json.loads(result.stdout.splitlines()[-1])
    return seconds, peak


def run_one(directory: Path, name: str, workers: int) -> None:
    source, function, _ = RUNS[name]
    os.sync()
    start = time.perf_counter()
    function(path_of(directory, source), path_of(directory, name), workers)
    seconds = time.perf_counter() - start
    status = Path("/proc/self/status").read_text()
    peak_kib = int(status.partition("VmHWM:")[2].split()[0])
    print(json.dumps([seconds, peak_kib * 1024 / 1e6]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run_one(arguments.directory, arguments.run, arguments.workers)
        return
    try:
        total = make_checkpoint(arguments.directory / "hf", arguments.gigabytes)
        print(f"{total / 1e9:.2f} GB, {arguments.workers} workers, {os.cpu_count()} cores\n")
        print("| | s | GB/s | of cp | peak MB |\n|---|---|---|---|---|")
        copied = 0.0
        for name, (_, _, is_kept) in RUNS.items():
            seconds, peak = measure(arguments.directory, name, arguments.workers)
            speed = total / seconds / 1e9
            copied = copied or speed
            print(f"| {name} | {seconds:.1f} | {speed:.2f} | {speed / copied:.2f} | {peak:.0f} |")
            sys.stdout.flush()
            if not is_kept:
                shutil.rmtree(path_of(arguments.directory, name))
    finally:
        shutil.rmtree(arguments.directory, ignore_errors=True)


if __name__ == "__main__":
    main()
