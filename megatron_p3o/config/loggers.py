"""Trackers that a run reports its metrics to, besides its own metrics.jsonl."""

from typing import Annotated, Literal

from pydantic import Field

from megatron_p3o.config.section import Section

_Text = Annotated[str, Field(min_length=1)]


class WandbSection(Section):
    """Weights & Biases; needs the extra `wandb`, and `wandb login` for mode online."""

    project: _Text
    entity: _Text | None = None
    """The team or user that owns the project; None: the default of the login."""
    name: _Text | None = None
    """What the run is called there; None: `run.dir`."""
    mode: Literal["online", "offline"] = "online"
    """offline writes to the run dir alone, for a later `wandb sync`."""
    group: _Text | None = None
    """Shows the runs of one group together."""


class MlflowSection(Section):
    """MLflow; needs the extra `mlflow`."""

    tracking_uri: _Text
    """A server (`http://host:5000`) or a directory (`file:runs/mlruns`). It is written to
    config.yaml: give a password as MLFLOW_TRACKING_PASSWORD instead."""
    experiment: _Text
    """Made if it is not there."""
    run_name: _Text | None = None
    """What the run is called there; None: `run.dir`."""


class LoggingSection(Section):
    wandb: WandbSection | None = None
    """Report to Weights & Biases; None: do not."""
    mlflow: MlflowSection | None = None
    """Report to MLflow; None: do not."""
