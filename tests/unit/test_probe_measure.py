"""Probes of the tiny model: exact serving is exact, coarser formats cost more, parts are right."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_p3o.config import RunConfig, parse_config, to_yaml
from megatron_p3o.numerics import E4M3, Scaling, fake_quantize
from megatron_p3o.probe.inputs import ProbeInputs, read_inputs
from megatron_p3o.probe.measure import AblationRow, Bench, ProbeResult, measure
from megatron_p3o.probe.options import ProbeOptions
from megatron_p3o.probe.parts import ablation_numerics, ablations
from megatron_p3o.probe.precisions import parse_precision
from megatron_p3o.probe.report import to_json
from megatron_p3o.probe.scorer import Scorer
from megatron_p3o.weights import ReshardOptions, TargetLayout, reshard
from tools.make_tiny_model import make_tiny_model

FP8 = parse_precision("fp8-block+kv-e4m3")
SEQUENCES = [((2, 12, 5, 15), (3, 8, 9, 4, 1)), ((7, 12, 7, 15), (6, 6)), ((4,), (5, 5, 2))]


def run_config(model_dir: Path, **sections: dict[str, Any]) -> RunConfig:
    tree: dict[str, dict[str, Any]] = {
        "run": {"dir": "runs/x", "seed": 3},
        "model": {"path": str(model_dir)},
        "data": {
            "source": "generator",
            "generator": "arithmetic",
            "generator_args": {"max_operand": 2, "template": "{a}{op}{b}="},
            "chat": False,
        },
        "train": {"steps": 4, "prompts_per_step": 4, "samples_per_prompt": 4},
        "sampling": {"max_new_tokens": 12, "temperature": 0.8},
    }
    return parse_config({**tree, **sections})


def probe(target: Path, *precisions: str, ablate: tuple[str, ...] = (), **options: Any) -> Any:
    words = ProbeOptions(
        target=target,
        num_prompts=5,
        samples_per_prompt=3,
        precisions=precisions,
        ablate=ablate or ("none",),
        **options,
    )
    words.check()
    return measure(
        read_inputs(words),
        words.serving(),
        samples_per_prompt=3,
        ablate=words.ablation_kinds(),
        ablate_precision=words.ablated(),
    )


@pytest.fixture(scope="module")
def run_yaml(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("probe") / "run.yaml"
    path.write_text(to_yaml(run_config(tiny_model_dir)))
    return path


@pytest.fixture(scope="module")
def result(run_yaml: Path) -> ProbeResult:
    names = ("fp32", "bf16", "fp8-block", "fp8-block@e5m2", "fp8-block@e2m1")
    return probe(run_yaml, *names, ablate=("parts", "layers"))


def metric(result: ProbeResult, precision: str, name: str) -> float:
    (found,) = (one for one in result.precisions if one.precision.name == precision)
    return found.metrics[name].value


def test_exact_serving_is_exact(result: ProbeResult) -> None:
    assert metric(result, "fp32", "mismatch/abs_logprob_max") < 1e-5
    assert metric(result, "fp32", "ess/mismatch") == pytest.approx(1, abs=1e-6)
    assert metric(result, "fp32", "ratio/mean") == pytest.approx(1, abs=1e-6)
    assert metric(result, "fp32", "mismatch/k3") < 1e-10


@pytest.mark.parametrize(
    "quantity", ["mismatch/abs_logprob_mean", "mismatch/k3", "mismatch/abs_logprob_p90"]
)
def test_coarser_numbers_cost_more(result: ProbeResult, quantity: str) -> None:
    names = ("fp32", "bf16", "fp8-block", "fp8-block@e5m2", "fp8-block@e2m1")
    costs = [metric(result, name, quantity) for name in names]
    assert costs == sorted(costs) and len(set(costs)) == len(costs)


def test_what_a_run_says_is_used(result: ProbeResult) -> None:
    assert (result.inputs.seed, result.inputs.sampling.temperature) == (3, 0.8)
    for one in result.precisions:
        assert 0 <= one.metrics["reward/mean"].value <= 1
        assert one.metrics["response/length_mean"].value <= 12
        tokens = sum(bucket.num_tokens for bucket in one.positions)
        assert tokens == one.metrics["tokens/response"].value


def test_ablation_rows_are_sorted_and_shared_out(result: ProbeResult) -> None:
    assert result.ablation is not None
    rows = result.ablation.rows
    assert len(rows) == 1 + 9 + 6 + 4
    costs = [row.metrics["mismatch/k3"].value for row in rows]
    assert costs == sorted(costs, reverse=True)
    by_name: dict[str, AblationRow] = {row.ablation.name: row for row in rows}
    full = by_name["everything"].metrics["mismatch/k3"].value
    assert by_name["everything"].share == 1
    assert by_name["down"].share == by_name["down"].metrics["mismatch/k3"].value / full
    assert by_name["first layer"].metrics == by_name["layer 0"].metrics


@pytest.fixture(scope="module")
def inputs(run_yaml: Path) -> ProbeInputs:
    return read_inputs(ProbeOptions(target=run_yaml))


def scorer(inputs: ProbeInputs, **changes: Any) -> Scorer:
    settings: dict[str, Any] = {"temperature": 0.8, "batch_size": 2, "device": torch.device("cpu")}
    return Scorer(inputs.model_dir, inputs.weights, **settings | changes)


def test_a_part_changes_its_weights_and_no_others(inputs: ProbeInputs) -> None:
    one, numerics = scorer(inputs), ablation_numerics(FP8.section)
    for row in ablations(inputs.rows, FP8.section, ("parts", "layers")):
        one.score(SEQUENCES, numerics, row.parts)
        for name, parameter in one.parameters.items():
            expected = inputs.weights[name]
            if name in row.parts.weights:
                expected = fake_quantize(expected, E4M3, Scaling((128, 128)))
                assert not torch.equal(expected, inputs.weights[name])
            assert torch.equal(parameter, expected), (row.name, name)
    coarser = ablation_numerics(parse_precision("fp8-block@e2m1").section)
    full = ablations(inputs.rows, FP8.section, ())[0].parts
    after = one.score(SEQUENCES, coarser, full)
    assert all(map(torch.equal, after, scorer(inputs).score(SEQUENCES, coarser, full)))


def test_no_part_costs_nothing_and_all_parts_everything(inputs: ProbeInputs) -> None:
    numerics = ablation_numerics(FP8.section)
    rows = {row.name: row.parts for row in ablations(inputs.rows, FP8.section, ("parts",))}
    used = scorer(inputs)
    exact = used.score(SEQUENCES)
    for parts in rows.values():
        used.score(SEQUENCES, numerics, parts)
    assert all(map(torch.equal, used.score(SEQUENCES, numerics), exact))
    full = scorer(inputs).score(SEQUENCES, numerics, rows["everything"])
    assert all(map(torch.equal, used.score(SEQUENCES, numerics, rows["everything"]), full))
    assert not any(map(torch.equal, full, exact))


def test_scores_do_not_depend_on_the_batch(inputs: ProbeInputs) -> None:
    together, apart = (scorer(inputs, batch_size=size).score(SEQUENCES) for size in (8, 1))
    for one, other, (_, response) in zip(together, apart, SEQUENCES, strict=True):
        assert one.shape == (len(response),)
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("name", ["fp8-block", "fp8-block:weights", "fp8-block+kv-e4m3"])
def test_the_scorer_rounds_as_the_engine(run_yaml: Path, inputs: ProbeInputs, name: str) -> None:
    """Its log-probs of the engine's tokens are nearer to the engine's than the exact ones by far;
    not equal, since a sum in another order may be rounded to another number."""
    precision = parse_precision(name)
    bench = Bench(read_inputs(ProbeOptions(target=run_yaml, num_prompts=5)), 3, lambda what: None)
    generations = bench.samples(precision)
    sequences = bench.sequences(generations)
    engine = torch.cat([torch.tensor(g.logprobs, dtype=torch.float64) for g in generations])
    exact = torch.cat(bench.scorer.score(sequences))
    full = ablations(inputs.rows, precision.section, ())[0].parts
    numerics = ablation_numerics(precision.section)
    rounded = torch.cat(bench.scorer.score(sequences, numerics, full))
    assert (engine - rounded).abs().mean() < 0.05 * (engine - exact).abs().mean()


def test_a_run_dir_is_probed_by_its_checkpoint(tiny_model_dir: Path, tmp_path: Path) -> None:
    """As the Hugging Face model that the checkpoint converts to, not as the one it started from."""
    trained = tmp_path / "trained"
    make_tiny_model(trained, seed=1)
    config = run_config(tiny_model_dir, run={"dir": str(tmp_path / "run"), "seed": 3})
    checkpoint = tmp_path / "run" / "checkpoints" / "step_2"
    layout = TargetLayout(tensor=2, pipeline=2)
    reshard(trained, checkpoint, ReshardOptions(to="torch_dist", layout=layout))
    shutil.rmtree(checkpoint / "hf")  # a run's checkpoint has none
    (checkpoint / "trainer.json").write_text("{}")
    (checkpoint.parent / "latest").write_text("step_2")
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(config))
    (tmp_path / "data.yaml").write_text(to_yaml(config))
    reshard(tmp_path / "run", tmp_path / "hf", ReshardOptions(to="hf"))

    sources: list[str] = []

    def numbers(target: Path, **options: Any) -> dict[str, Any]:
        found = to_json(probe(target, "fp8-block", ablate=("layers",), **options))
        sources.append(found.pop("source"))
        return found

    of_run = numbers(tmp_path / "run")
    assert of_run == numbers(tmp_path / "hf", run=tmp_path / "data.yaml")
    assert of_run == numbers(checkpoint, run=tmp_path / "data.yaml")
    assert of_run != numbers(tmp_path / "data.yaml")
    expected = [checkpoint, tmp_path / "hf", checkpoint, tiny_model_dir]
    assert sources == [*map(str, expected)]
