"""A probe's result as tables for people and as JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_p3o.probe.measure import AblationResult, AblationRow, PrecisionResult, ProbeResult
from megatron_p3o.probe.statistics import Measured, PositionBucket

NUMERICS = "emulated FP8: rounded numbers, products in fp32"
_LOGPROB_COLUMNS = {
    "mismatch/k3": "k3",
    "mismatch/abs_logprob_mean": "|dlogp| mean",
    "mismatch/abs_logprob_p50": "p50",
    "mismatch/abs_logprob_p90": "p90",
    "mismatch/abs_logprob_p99": "p99",
    "mismatch/abs_logprob_max": "max",
}
_RATIO_COLUMNS = {
    "ess/mismatch": "ESS",
    "ratio/mean": "mean ratio",
    "ratio/p01": "p01",
    "ratio/p99": "p99",
    "ratio/max": "max",
    "tokens/response": "tokens",
    "response/length_mean": "length",
    "reward/mean": "reward",
}
_ABLATION_COLUMNS = {
    "mismatch/k3": "k3",
    "mismatch/abs_logprob_mean": "|dlogp| mean",
    "ess/mismatch": "ESS",
}
_KINDS = {
    "parts": "Only this part rounded",
    "complement": "All but this part rounded",
    "layers": "Only this layer rounded",
}


def print_result(result: ProbeResult, console: Console) -> None:
    """Header and tables; standard errors by prompts are in brackets."""
    console.print(Text(header(result)), soft_wrap=True)
    console.print(_metric_table("Log-probs, nats", result.precisions, _LOGPROB_COLUMNS))
    console.print(_metric_table("Ratios exact / served", result.precisions, _RATIO_COLUMNS))
    console.print(_position_table("|dlogp| mean by response position", result.precisions, "abs"))
    console.print(_position_table("k3 by response position", result.precisions, "k3"))
    if result.ablation is not None:
        for table in _ablation_tables(result.ablation):
            console.print(table)


def header(result: ProbeResult) -> str:
    """One line: what was measured, and how."""
    inputs = result.inputs
    tokens = sum(r.metrics["tokens/response"].value for r in result.precisions)
    return (
        f"{inputs.source} ({inputs.architecture.family}); {NUMERICS}; seed {inputs.seed}, "
        f"temperature {inputs.sampling.temperature:g}; {len(inputs.prompts)} prompts x "
        f"{result.samples_per_prompt} samples, {tokens:.0f} tokens over {len(result.precisions)} "
        f"precisions; {result.device}"
    )


def to_json(result: ProbeResult) -> dict[str, Any]:
    """Everything, JSON-ready."""
    inputs = result.inputs
    return {
        "source": inputs.source,
        "family": inputs.architecture.family,
        "numerics": NUMERICS,
        "device": result.device,
        "seed": inputs.seed,
        "temperature": inputs.sampling.temperature,
        "max_new_tokens": inputs.sampling.max_new_tokens,
        "num_prompts": len(inputs.prompts),
        "samples_per_prompt": result.samples_per_prompt,
        "prompt_ids": [prompt.item.prompt_id for prompt in inputs.prompts],
        "precisions": [
            {
                "name": one.precision.name,
                "settings": one.precision.section.model_dump(
                    mode="json", exclude={"trainer", "fp8"}
                ),
                **_metrics_json(one.metrics),
                "positions": [_bucket_json(bucket) for bucket in one.positions],
            }
            for one in result.precisions
        ],
        "ablation": None if result.ablation is None else _ablation_json(result.ablation),
    }


def _metrics_json(metrics: Mapping[str, Measured]) -> dict[str, Any]:
    return {
        "metrics": {name: measured.value for name, measured in metrics.items()},
        "standard_errors": {
            name: measured.standard_error
            for name, measured in metrics.items()
            if measured.standard_error is not None
        },
    }


def _bucket_json(bucket: PositionBucket) -> dict[str, Any]:
    metrics = {"mismatch/abs_logprob_mean": bucket.abs_mean, "mismatch/k3": bucket.k3}
    return {
        "first": bucket.first,
        "last": bucket.last,
        "tokens": bucket.num_tokens,
        **_metrics_json(metrics),
    }


def _ablation_json(result: AblationResult) -> dict[str, Any]:
    return {
        "precision": result.precision.name,
        "rows": [
            {
                "name": row.ablation.name,
                "kind": row.ablation.kind,
                "share_of_k3": row.share,
                "num_rounded_weights": len(row.ablation.parts.weights),
                "num_rounded_inputs": len(row.ablation.parts.inputs),
                "num_rounded_kv_layers": len(row.ablation.parts.kv_layers),
                **_metrics_json(row.metrics),
            }
            for row in result.rows
        ],
    }


def _metric_table(
    title: str, results: Sequence[PrecisionResult], columns: Mapping[str, str]
) -> Table:
    shown = {k: v for k, v in columns.items() if any(k in one.metrics for one in results)}
    table = _table(title, "precision", *shown.values())
    for one in results:
        table.add_row(one.precision.name, *(_cell(one.metrics.get(name)) for name in shown))
    return table


def _position_table(title: str, results: Sequence[PrecisionResult], quantity: str) -> Table:
    longest = max((one.positions for one in results), key=len)
    labels = [_label(bucket) for bucket in longest]
    table = _table(title, "precision", *labels)
    for one in results:
        cells = [
            _cell(bucket.abs_mean if quantity == "abs" else bucket.k3) for bucket in one.positions
        ]
        table.add_row(one.precision.name, *cells)
    return table


def _ablation_tables(result: AblationResult) -> list[Table]:
    full = next(row for row in result.rows if row.ablation.kind == "full")
    tables = []
    for kind, title in _KINDS.items():
        rows = [row for row in result.rows if row.ablation.kind == kind]
        if not rows:
            continue
        table = _table(
            f"{title}: {result.precision.name} against exact, on the exact engine's samples",
            "",
            *_ABLATION_COLUMNS.values(),
            "share of k3",
        )
        for row in (full, *rows):
            table.add_row(*_ablation_cells(row))
        tables.append(table)
    return tables


def _ablation_cells(row: AblationRow) -> list[str]:
    share = "-" if row.share is None else f"{row.share:.1%}"
    cells = [_cell(row.metrics[name]) for name in _ABLATION_COLUMNS]
    return [row.ablation.name, *cells, share]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(Text(name), justify="right" if index else "left", no_wrap=True)
    return table


def _label(bucket: PositionBucket) -> str:
    if bucket.first == bucket.last:
        return f"{bucket.first}"
    return f"{bucket.first}-{bucket.last}"


def _cell(measured: Measured | None) -> str:
    if measured is None:
        return "-"
    value = f"{measured.value:.4g}"
    if measured.standard_error is None:
        return value
    return f"{value} ({measured.standard_error:.1g})"
