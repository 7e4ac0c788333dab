"""Where a run's metrics go: metrics.jsonl always, and the trackers that the configuration names.

A resumed run goes on with its run in each tracker, whose id is kept in the run dir. Both trackers
only add: steps that a resumed run repeats stay there as they were first sent in wandb, and are
there twice in MLflow.
"""

import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from megatron_p3o.config import MlflowSection, RunConfig, WandbSection
from megatron_p3o.run_dir import RunDir, replace_text
from megatron_p3o.trainer.background import BackgroundSink
from megatron_p3o.trainer.metrics import JsonlSink, MetricSink, TensorBoardSink


class WandbSink:
    """A run of Weights & Biases; alarms are logged as text."""

    def __init__(self, section: WandbSection, config: RunConfig, run_dir: RunDir) -> None:
        import wandb

        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            name=section.name or config.run.dir,
            group=section.group,
            mode=section.mode,
            dir=str(run_dir.root),
            config=config.model_dump(mode="json"),
            resume="allow",
            id=_wandb_id(run_dir.wandb_id),
        )

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """A run of MLflow, whose metrics are numbers: alarms are left out."""

    def __init__(self, section: MlflowSection, config: RunConfig, run_dir: RunDir) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_tracking_uri(section.tracking_uri)
        mlflow.set_experiment(section.experiment)
        known = _read_id(run_dir.mlflow_id)
        if known is not None:
            mlflow.start_run(run_id=known)
            return
        run = mlflow.start_run(run_name=section.run_name or config.run.dir)
        replace_text(run_dir.mlflow_id, run.info.run_id + "\n")
        # Parameters cannot be changed, so a resumed run must not send its own.
        mlflow.log_params(_flat(config.model_dump(mode="json")))

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, str)}
        self._mlflow.log_metrics(numbers, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def open_sinks(config: RunConfig, run_dir: RunDir, *, first_step: int) -> list[MetricSink]:
    """The sinks of a run, on rank 0. Only the first, metrics.jsonl, can stop it."""
    sinks: list[MetricSink] = [JsonlSink(run_dir.metrics, first_step=first_step)]
    if config.run.tensorboard:
        sinks.append(
            BackgroundSink(
                "run.tensorboard",
                partial(TensorBoardSink, run_dir.tensorboard, first_step=first_step),
                remedy=f"Look at the disk of {str(run_dir.tensorboard)!r}.",
            )
        )
    if config.logging.wandb is not None:
        sinks.append(
            BackgroundSink(
                "logging.wandb",
                partial(WandbSink, config.logging.wandb, config, run_dir),
                remedy="Run `wandb login` and look at the network, or use logging.wandb.mode="
                "offline and `wandb sync` later.",
            )
        )
    if config.logging.mlflow is not None:
        sinks.append(
            BackgroundSink(
                "logging.mlflow",
                partial(MlflowSink, config.logging.mlflow, config, run_dir),
                remedy="Look at logging.mlflow.tracking_uri and whether its server answers.",
            )
        )
    return sinks


def _wandb_id(path: Path) -> str:
    """The stored id, or a new one. Stored first: a run that fails to open tries the same again."""
    known = _read_id(path)
    if known is None:
        known = secrets.token_hex(8)
        replace_text(path, known + "\n")
    return known


def _read_id(path: Path) -> str | None:
    """The id in a file; None where the file is missing or empty."""
    return (path.read_text(encoding="utf-8").strip() if path.is_file() else "") or None


def _flat(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Dotted name -> value of every field that is no section."""
    flat: dict[str, object] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
