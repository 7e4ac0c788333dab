"""What a finished run shows: a table and a figure, from its run dir alone."""

from pathlib import Path

from megatron_p3o.config import RunConfig
from megatron_p3o.preflight import RunInputs
from megatron_p3o.run_dir import RunDir, read_trainer_state
from megatron_p3o.trainer.curves import draw_curves
from megatron_p3o.trainer.display import print_summary
from megatron_p3o.trainer.metrics import read_metrics


def report(config: RunConfig) -> None:
    """Table and figure of a finished run, from its run dir."""
    run_dir = RunDir(Path(config.run.dir))
    records = read_metrics(run_dir.metrics)
    draw_curves(records, run_dir.curves, title=f"{run_dir.root.name} ({config.objective.name})")
    print_summary(records, run_dir)


def is_finished(config: RunConfig, inputs: RunInputs) -> bool:
    """Whether the checkpoint to resume from is already the last step's."""
    return (
        inputs.resume_from is not None
        and read_trainer_state(inputs.resume_from)["step"] >= config.train.steps
    )
