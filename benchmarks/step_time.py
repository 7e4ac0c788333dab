"""Step times of the quickstart and of the plain loop, taken in turns on one machine.

    python benchmarks/step_time.py --rounds 3 --steps 4

Each round runs `p3o train examples/quickstart/run.yaml` for a few steps, then
`benchmarks/plain_loop.py` for as many. The first step of every run, which warms up, is left out.
Machines drift, so the runs alternate, and the figure to read is the ratio of the medians.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_p3o.trainer.metrics import read_metrics

ROOT = Path(__file__).parents[1]


def p3o_times(directory: Path, steps: int, seed: int) -> list[float]:
    """Seconds of each step of the quickstart, the first left out."""
    run_dir = directory / f"p3o_{seed}"
    overrides = {"run.dir": run_dir, "run.seed": seed, "train.steps": steps, "checkpoint.every": 0}
    words = [word for name, value in overrides.items() for word in (f"--{name}", str(value))]
    run([sys.executable, "-m", "megatron_p3o.cli", "train", "examples/quickstart/run.yaml", *words])
    return [record["time/step_s"] for record in read_metrics(run_dir / "metrics.jsonl")][1:]


def plain_times(directory: Path, steps: int, seed: int) -> list[float]:
    """Seconds of each step of the plain loop, the first left out."""
    path = directory / f"plain_{seed}.json"
    words = ["--steps", str(steps), "--seed", str(seed), "--json", str(path)]
    run([sys.executable, "benchmarks/plain_loop.py", *words])
    return [record["time/step_s"] for record in json.loads(path.read_text())][1:]


def run(command: list[str]) -> None:
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    ours: list[float] = []
    plain: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        for seed in range(arguments.rounds):
            ours += p3o_times(Path(name), arguments.steps, seed)
            plain += plain_times(Path(name), arguments.steps, seed)
            print(
                f"round {seed + 1}, last step: p3o {ours[-1]:.1f} s, plain loop {plain[-1]:.1f} s"
            )
    a, b = statistics.median(ours), statistics.median(plain)
    print(f"median of {len(ours)} steps: p3o {a:.1f} s, plain loop {b:.1f} s, ratio {a / b:.2f}")


if __name__ == "__main__":
    main()
