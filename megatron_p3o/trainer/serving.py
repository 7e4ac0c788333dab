"""The parts of a run on SGLang servers, from its configuration."""

import os
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megatron_p3o.api_key import read_api_key
from megatron_p3o.architecture import ModelArchitecture
from megatron_p3o.config import RunConfig
from megatron_p3o.parallel.setup import ParallelContext
from megatron_p3o.preflight import RunInputs
from megatron_p3o.rollout.sglang import (
    Cluster,
    ExpertLayout,
    GenerateOptions,
    given_servers,
    managed_servers,
)
from megatron_p3o.run_dir import RunDir, read_trainer_state
from megatron_p3o.trainer.cluster import ClusterRollouts
from megatron_p3o.trainer.publish import Publisher, PublishOptions
from megatron_p3o.trainer.served_model import published_model, server_flags

_BYTES_PER_MB = 2**20


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
    api_key = read_api_key(config.rollout)
    rollout = config.rollout
    options = GenerateOptions(
        sampling=config.sampling,
        eos_token_ids=inputs.architecture.eos_token_ids,
        experts=_experts(inputs.architecture) if config.model.router_replay else None,
    )

    def make_cluster(on_event: Callable[[], None]) -> Cluster:
        if rollout.servers:
            server_set = given_servers(rollout)
        else:
            flags = server_flags(
                config,
                inputs.architecture,
                device_type=context.device.type,
                directory=run_dir.servers.absolute(),
                first_gpu=_first_free_gpu(config, context.device.type),
                first_step=_first_step(inputs),
                api_key=api_key,
            )
            server_set = managed_servers(flags)
        return Cluster(server_set, rollout, options, api_key=api_key, on_event=on_event)

    model = published_model(config, inputs.architecture, device_type=context.device.type)
    return ClusterRollouts(
        config,
        context,
        Publisher(context, model, publish_options(config, run_dir)),
        prompts=inputs.prompts,
        tokenizer=tokenizer,
        make_cluster=make_cluster,
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


def _experts(architecture: ModelArchitecture) -> ExpertLayout:
    moe = architecture.moe
    assert moe is not None
    return ExpertLayout(
        num_layers=architecture.num_layers,
        moe_layers=moe.layers,
        experts_per_token=moe.experts_per_token,
    )


def _first_free_gpu(config: RunConfig, device_type: str) -> int:
    """After those of this node's trainer ranks, unless the configuration says otherwise."""
    if config.rollout.launch.first_gpu is not None:
        return config.rollout.launch.first_gpu
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device_type == "cuda" else 0


def _first_step(inputs: RunInputs) -> int:
    return 0 if inputs.resume_from is None else read_trainer_state(inputs.resume_from)["step"]
