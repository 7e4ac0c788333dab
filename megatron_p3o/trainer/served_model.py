"""In which numbers a run's model is served, and how its servers are started for them."""

from pathlib import Path

import torch

from megatron_p3o.architecture import ModelArchitecture
from megatron_p3o.config import RunConfig
from megatron_p3o.model_files import read_json
from megatron_p3o.parallel.fp8 import parameter_dtype
from megatron_p3o.rollout import EmbeddedEngine, ServedNumerics
from megatron_p3o.rollout.sglang import ServerFlags
from megatron_p3o.trainer.publish import PublishedModel
from megatron_p3o.weights.families import param_rows
from megatron_p3o.weights.publish import ServedFormat, served_config

_SERVED = {
    "fp32": ServedFormat(dtype=torch.float32),
    "bf16": ServedFormat(dtype=torch.bfloat16),
    # What is not FP8 stays as the trainer holds it: a server casts it to its own dtype.
    "fp8-block": ServedFormat(fp8=True),
}


def published_model(
    config: RunConfig, architecture: ModelArchitecture, *, device_type: str
) -> PublishedModel:
    """What servers of the configured precision are given.

    Args:
        device_type: of the trainer.

    Raises:
        InputError: config.json cannot be read.
    """
    return PublishedModel(
        architecture=architecture,
        served=_SERVED[config.precision.rollout],
        held=parameter_dtype(config.precision, device_type),
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
    model = published_model(config, architecture, device_type=device_type)
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


def embedded_engine(
    config: RunConfig, architecture: ModelArchitecture, device: torch.device
) -> EmbeddedEngine:
    """The engine in this process, rounding as servers of the configured precision would."""
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    precision = config.precision
    return EmbeddedEngine(
        Path(config.model.path),
        sampling=config.sampling,
        seed=config.run.seed,
        batch_size=config.rollout.batch_size,
        dtype=parameter_dtype(precision, device.type)
        if precision.rollout_is_fp8
        else dtypes[precision.rollout],
        device=device,
        eos_token_ids=architecture.eos_token_ids,
        report_experts=config.model.router_replay,
        numerics=ServedNumerics.of(precision),
        fp8_weights=frozenset(n for row in param_rows(architecture) if row.fp8 for n in row.hf),
        shift=config.rollout.temperature_shift,
    )
