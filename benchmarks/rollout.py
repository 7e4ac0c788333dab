"""What rollouts on SGLang servers cost, on this machine.

    python benchmarks/rollout.py --directory /tmp/rollout-bench [--rounds 5]

Starts two real servers with the given model, and prints

    client     the sampler against bare concurrent HTTP to one server, in turns, as a ratio
    servers    samples/s on one server and on two
    publish    seconds per GB of each transport, to one server, against a copy in memory
    staleness  shares of time in which trainer and servers wait, synchronous and one step off

Ratios are of medians of turns in one run: the machine may be busy.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_p3o.architecture import read_architecture
from megatron_p3o.config import RunConfig, parse_config
from megatron_p3o.rollout.sglang import Cluster, GenerateOptions, managed_servers
from megatron_p3o.rollout.sglang.update import PublishReport
from megatron_p3o.run_dir import RunDir
from megatron_p3o.trainer.publish import Publisher, PublishOptions
from megatron_p3o.trainer.served_model import published_model, server_flags
from megatron_p3o.weights.families import param_rows

NUM_SAMPLES = 32
NEW_TOKENS = 16
CONCURRENCY = 16
GB = 1e9

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class OneRank:
    """Publishes alone."""

    rank = 0
    device = torch.device("cpu")

    def broadcast_object(self, value: Any) -> Any:
        return value


@app.command()
def main(
    directory: Annotated[Path, typer.Option(help="For logs, weights and run dirs.")],
    model: Annotated[Path, typer.Option(help="Model directory.")] = Path(
        "models/SmolLM2-135M-Instruct"
    ),
    python: Annotated[Path, typer.Option(help="Of SGLang's environment.")] = Path(
        ".venv-sglang/bin/python"
    ),
    rounds: Annotated[int, typer.Option(help="Turns of every comparison.")] = 5,
    steps: Annotated[int, typer.Option(help="Training steps of each staleness.")] = 5,
) -> None:
    """Measure, and print Markdown tables."""
    directory.mkdir(parents=True, exist_ok=True)
    config = run_config(directory, model, python)
    asyncio.run(on_servers(config, directory, rounds))
    staleness(directory, model, python, steps)


def run_config(directory: Path, model: Path, python: Path) -> RunConfig:
    return parse_config(
        {
            "run": {"dir": str(directory / "unused")},
            "model": {"path": str(model)},
            "data": {"source": "generator", "generator": "arithmetic", "max_prompt_tokens": 64},
            "train": {"steps": 1, "prompts_per_step": 1, "samples_per_prompt": 2},
            "sampling": {"max_new_tokens": NEW_TOKENS},
            "rollout": {
                "engine": "sglang",
                "concurrency": CONCURRENCY,
                "launch": {"replicas": 2, "python": str(python)},
            },
        }
    )


async def on_servers(config: RunConfig, directory: Path, rounds: int) -> None:
    architecture = read_architecture(config.model.path)
    flags = server_flags(
        config, architecture, device_type="cpu", directory=(directory / "servers").absolute()
    )
    server_set = managed_servers(flags)
    options = GenerateOptions(sampling=config.sampling, eos_token_ids=architecture.eos_token_ids)
    both = Cluster(server_set, config.rollout, options, api_key=None, on_event=lambda: None)
    await both.start()
    try:
        await until(lambda: len(both.fleet.in_need()) == 2)
        weights = named_tensors(config)
        await publish(both, publisher(config, directory, "tensor"), weights)
        await compare_client(both, server_set.servers[0].url, options, rounds)
        await compare_transports(both, config, directory, weights, rounds)
    finally:
        await both.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.1)


def named_tensors(config: RunConfig) -> list[tuple[str, Tensor]]:
    """Of the model directory, in the order of the trainer."""
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    weights = model.state_dict()
    rows = param_rows(read_architecture(config.model.path))
    return [(name, weights[name]) for row in rows for name in row.hf]


def publisher(config: RunConfig, directory: Path, transport: Any) -> Publisher:
    model = published_model(config, read_architecture(config.model.path), device_type="cpu")
    options = PublishOptions(
        transport=transport,
        directory=directory / "weights",
        interrupt="retract",
        bucket_bytes=config.rollout.publish.bucket_mb * 2**20,
        verify_every=0,
    )
    return Publisher(OneRank(), replace(model, held=torch.float32), options)


async def publish(
    both: Cluster, by: Publisher, weights: list[tuple[str, Tensor]], *, only: int | None = None
) -> PublishReport:
    version = (both.fleet.version or 0) + 1
    controls = both.fleet.begin_update(version, only_in_need=False)[:only]
    report = await asyncio.to_thread(by.publish, weights, version, controls)
    assert report.is_complete, report.failed
    both.fleet.end_update(report, version)
    return report


async def timed(work: Awaitable[Any]) -> float:
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


async def per_token(work: Awaitable[int]) -> float:
    """Seconds per token of work that says how many tokens it made."""
    started = time.perf_counter()
    num_tokens = await work
    return (time.perf_counter() - started) / num_tokens


async def compare_client(both: Cluster, url: str, options: GenerateOptions, rounds: int) -> None:
    """The sampler's bookkeeping and checks against the same requests without any."""
    prompts = [[100 + index, *range(200, 220)] for index in range(NUM_SAMPLES)]
    single, double, bare = [], [], []
    places = list(both.fleet.serving_urls())
    assert url == places[0]
    for _ in range(rounds + 1):  # the first turn warms up
        bare.append(await per_token(bare_requests(url, prompts, options)))
        with_one(both, 1)
        single.append(await per_token(samples(both, prompts)))
        with_one(both, 2)
        double.append(await per_token(samples(both, prompts)))
    one, two, raw = (statistics.median(times[1:]) for times in (single, double, bare))
    ratios = [s / b for s, b in zip(single[1:], bare[1:], strict=True)]
    print(f"\n{NUM_SAMPLES} samples, {CONCURRENCY} in flight on each server\n")
    print("| | Tokens/s |\n|---|---|")
    for name, seconds in (("bare HTTP, one server", raw), ("one server", one), ("two", two)):
        print(f"| {name} | {1 / seconds:.0f} |")
    print(
        f"\nsampler / bare HTTP, seconds per token: {statistics.median(ratios):.3f} in the median"
    )
    print(f"of turns, {min(ratios):.3f} to {max(ratios):.3f}; two servers / one: {one / two:.2f}")


def with_one(both: Cluster, count: int) -> None:
    """Let only the first servers serve."""
    for index, place in enumerate(both.fleet._places.values()):
        place.version = both.fleet.version if index < count else None


async def samples(both: Cluster, prompts: list[list[int]]) -> int:
    responses = await asyncio.gather(
        *(both.sampler.sample(str(i), prompt, NEW_TOKENS) for i, prompt in enumerate(prompts))
    )
    return sum(len(response.token_ids) for response in responses)


async def bare_requests(url: str, prompts: list[list[int]], options: GenerateOptions) -> int:
    places = asyncio.Semaphore(CONCURRENCY)
    async with aiohttp.ClientSession() as session:

        async def one(prompt: list[int]) -> int:
            async with (
                places,
                session.post(f"{url}/generate", json=options.body(prompt, NEW_TOKENS)) as answer,
            ):
                return len((await answer.json())["output_ids"])

        return sum(await asyncio.gather(*map(one, prompts)))


async def compare_transports(
    both: Cluster,
    config: RunConfig,
    directory: Path,
    weights: list[tuple[str, Tensor]],
    rounds: int,
) -> None:
    nbytes = sum(tensor.nbytes for _, tensor in weights)
    by = {name: publisher(config, directory, name) for name in ("tensor", "distributed", "disk")}
    times: dict[str, list[float]] = {name: [] for name in ("copy", *by)}
    for _ in range(rounds + 1):  # the first turn forms groups and warms up
        started = time.perf_counter()
        copies = [tensor.clone() for _, tensor in weights]
        times["copy"].append(time.perf_counter() - started)
        del copies
        for name, transport in by.items():
            times[name].append(await timed(publish(both, transport, weights, only=1)))
    for transport in by.values():
        transport.close()
    copy = statistics.median(times["copy"][1:])
    print(f"\n{nbytes / GB:.2f} GB in fp32 to one server\n")
    print("| | Seconds per GB | Against a copy in memory |\n|---|---|---|")
    for name, found in times.items():
        median = statistics.median(found[1:])
        print(f"| {name} | {median / nbytes * GB:.2f} | {median / copy:.1f} |")


def staleness(directory: Path, model: Path, python: Path, steps: int) -> None:
    """Two training runs, which differ in `rollout.max_staleness` alone."""
    print(f"\n{steps} steps of 4 x 8 samples of examples/sglang_cpu, without the first two\n")
    print("| `max_staleness` | Step, seconds | Trainer waits | Servers wait |\n|---|---|---|---|")
    for bound in (0, 1):
        run_dir = RunDir(directory / f"staleness_{bound}")
        words = [
            *("--model.path", str(model), "--rollout.launch.python", str(python)),
            *("--rollout.max_staleness", str(bound), "--run.dir", str(run_dir.root)),
            *("--train.steps", str(steps), "--checkpoint.every", "0"),
            *("--train.prompts_per_step", "4"),
        ]
        command = [sys.executable, "-m", "megatron_p3o.cli", "train"]
        subprocess.run(
            [*command, "examples/sglang_cpu/run.yaml", *words],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        records = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()][2:]
        whole = sum(record["time/step_s"] for record in records)
        trainer = sum(record["time/rollout_s"] for record in records) / whole
        busy = sum(record["rollout/busy_s"] for record in records) / whole
        servers = f"{max(0.0, 1 - busy):.0%}"
        print(f"| {bound} | {whole / len(records):.1f} | {trainer:.0%} | {servers} |")


if __name__ == "__main__":
    app()
