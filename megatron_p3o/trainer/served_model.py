"""In which numbers a run's model is served, and how its servers are started for them."""

from pathlib import Path

import torch

from megatron_p3o.architecture import ModelArchitecture
from megatron_p3o.config import RunConfig
from megatron_p3o.model_files import read_json
from megatron_p3o.rollout.sglang import ServerFlags
from megatron_p3o.trainer.publish import PublishedModel
from megatron_p3o.weights.publish import ServedFormat, served_config

_TRAINER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SERVED = {
    "fp32": ServedFormat(dtype=torch.float32),
    "bf16": ServedFormat(dtype=torch.bfloat16),
    # What is not FP8 stays as the trainer holds it: a server casts it to its own dtype.
    "fp8-block": ServedFormat(fp8=True),
}


def published_model(config: RunConfig, architecture: ModelArchitecture) -> PublishedModel:
    """What servers of the configured precision are given.

    Raises:
        InputError: config.json cannot be read.
    """
    return PublishedModel(
        architecture=architecture,
        served=_SERVED[config.precision.rollout],
        held=_TRAINER_DTYPES[config.precision.trainer],
        config=read_json(Path(config.model.path), "config.json"),
        files=Path(config.model.path),
    )


def server_flags(
    config: RunConfig,
    architecture: ModelArchitecture,
    *,
    device_type: str,
    directory: Path,
    first_gpu: int = 0,
    first_step: int = 0,
    api_key: str | None = None,
) -> ServerFlags:
    """How servers of the configured precision are started; see `ServerFlags`.

    Raises:
        InputError: config.json cannot be read.
    """
    model = published_model(config, architecture)
    changed = None
    if model.served.fp8:
        changed = served_config(architecture, model.served, model.config, model.held)
    return ServerFlags(
        config=config,
        architecture=architecture,
        device_type=device_type,
        directory=directory,
        model_config=changed,
        first_gpu=first_gpu,
        first_step=first_step,
        api_key=api_key,
    )
