"""The parts of a run on SGLang servers, from its configuration."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from megatron_p3o.config import RunConfig
from megatron_p3o.model_files import read_json
from megatron_p3o.parallel.setup import ParallelContext
from megatron_p3o.preflight import RunInputs
from megatron_p3o.rollout.sglang import (
    Cluster,
    GenerateOptions,
    ServerFlags,
    given_servers,
    managed_servers,
    read_api_key,
)
from megatron_p3o.run_dir import RunDir, read_trainer_state
from megatron_p3o.trainer.cluster import ClusterRollouts
from megatron_p3o.trainer.publish import PublishedModel, Publisher, PublishOptions
from megatron_p3o.weights.publish import ServedFormat

_BYTES_PER_MB = 2**20
_TRAINER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def cluster_rollouts(
    config: RunConfig,
    inputs: RunInputs,
    context: ParallelContext,
    run_dir: RunDir,
    tokenizer: PreTrainedTokenizerBase,
) -> ClusterRollouts:
    """Rollouts on the servers that the configuration names or has started. Collective.

    Raises:
        UserError: the API key or the model cannot be read, or a prompt cannot be encoded.
    """
    assert inputs.prompts is not None
    api_key = read_api_key(config)
    rollout = config.rollout
    options = GenerateOptions(
        sampling=config.sampling,
        eos_token_ids=inputs.architecture.eos_token_ids,
        routed_experts=config.model.router_replay,
    )
    first_step = 0
    if inputs.resume_from is not None:
        first_step = read_trainer_state(inputs.resume_from)["step"]

    def make_cluster(on_event: Callable[[], None]) -> Cluster:
        server_set = given_servers(rollout)
        if not rollout.servers:
            server_set = managed_servers(
                ServerFlags(
                    config=config,
                    architecture=inputs.architecture,
                    device_type=context.device.type,
                    directory=run_dir.servers.absolute(),
                    first_gpu=_first_free_gpu(config, context.device.type),
                    first_step=first_step,
                    api_key=api_key,
                )
            )
        return Cluster(server_set, rollout, options, api_key=api_key, on_event=on_event)

    return ClusterRollouts(
        config,
        context,
        Publisher(context, published_model(config, inputs), publish_options(config, run_dir)),
        prompts=inputs.prompts,
        tokenizer=tokenizer,
        make_cluster=make_cluster,
    )


def published_model(config: RunConfig, inputs: RunInputs) -> PublishedModel:
    """What servers of the configured precision are given."""
    precision = config.precision.rollout
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8-block": None}
    return PublishedModel(
        architecture=inputs.architecture,
        served=ServedFormat(dtype=dtypes[precision], fp8=precision == "fp8-block"),
        held=_TRAINER_DTYPES[config.precision.trainer],
        config=read_json(Path(config.model.path), "config.json"),
        files=Path(config.model.path),
    )


def publish_options(config: RunConfig, run_dir: RunDir) -> PublishOptions:
    publish = config.rollout.publish
    return PublishOptions(
        transport=publish.transport,
        directory=Path(publish.directory) if publish.directory else run_dir.weights,
        interrupt=config.rollout.interrupt,
        bucket_bytes=publish.bucket_mb * _BYTES_PER_MB,
        verify_every=publish.verify_every,
        timeout_s=publish.timeout_s,
        drain_timeout_s=config.rollout.request_timeout_s,
    )


def _first_free_gpu(config: RunConfig, device_type: str) -> int:
    """After those of this node's trainer ranks, unless the configuration says otherwise."""
    if config.rollout.launch.first_gpu is not None:
        return config.rollout.launch.first_gpu
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device_type == "cuda" else 0
