"""`p3o serve`: this node's SGLang servers and their router, kept alive until told to end.

They are the servers that `p3o train` would start by itself from the same configuration. It finds
them by `rollout.servers` and gives them their weights.
"""

import asyncio
import logging
import signal
import socket
from pathlib import Path

import torch

from megatron_p3o.api_key import read_api_key
from megatron_p3o.architecture import read_architecture
from megatron_p3o.config import RunConfig
from megatron_p3o.errors import ConfigurationError
from megatron_p3o.rollout.sglang import (
    Cluster,
    GenerateOptions,
    ServerSet,
    managed_servers,
)
from megatron_p3o.trainer.served_model import server_flags

_LOOK_S = 0.2
_EVERYWHERE = ("0.0.0.0", "::")


def serve(config: RunConfig, logs: Path | None) -> None:
    """Start the servers, print their addresses, restart those that fall, end them at a signal.

    Args:
        config: of the run; `rollout.launch` says what to start.
        logs: directory of the logs; None: the run dir's name with `.servers`.

    Raises:
        UserError: nothing to start, or the model or the API key cannot be read.
        RunError: a server does not start.
    """
    if not config.rollout.launch.replicas:
        raise ConfigurationError(
            "rollout.launch.replicas=0 leaves p3o serve nothing to start; set it to the number of "
            "servers on this node"
        )
    for notice in config.notices():
        print(f"warning: {notice}", flush=True)
    architecture = read_architecture(config.model.path)
    api_key = read_api_key(config.rollout)
    server_set = managed_servers(
        server_flags(
            config,
            architecture,
            device_type="cuda" if torch.cuda.is_available() else "cpu",
            directory=(logs or Path(f"{config.run.dir}.servers")).absolute(),
            first_gpu=config.rollout.launch.first_gpu or 0,
            api_key=api_key,
        )
    )
    options = GenerateOptions(sampling=config.sampling, eos_token_ids=architecture.eos_token_ids)
    asyncio.run(_serve(config, server_set, options, api_key))


async def _serve(
    config: RunConfig, server_set: ServerSet, options: GenerateOptions, api_key: str | None
) -> None:
    """Consumes signals and the servers' troubles; waits for either; produces restarts and log
    lines; ends with all servers ended."""
    told_to_end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told_to_end.set)
    cluster = Cluster(
        server_set,
        config.rollout,
        options,
        api_key=api_key,
        on_event=lambda: None,
        # A trainer that gives a server weights keeps it from answering for that long.
        patience_s=max(config.rollout.probe_timeout_s, config.rollout.publish.timeout_s),
    )
    try:
        await cluster.start()
        is_announced = False
        while not told_to_end.is_set():
            if cluster.fleet.fatal is not None:
                raise cluster.fleet.fatal
            if not is_announced and not cluster.fleet.is_starting:
                is_announced = True
                print(announcement(config, server_set), flush=True)
            await asyncio.sleep(_LOOK_S)
        logging.getLogger(__name__).info("told to end; ending the servers")
    finally:
        await cluster.close()


def announcement(config: RunConfig, server_set: ServerSet) -> str:
    """The words that make `p3o train` use these servers."""
    urls = ", ".join(_public(server.url, config) for server in server_set.servers)
    words = [f"--rollout.servers '[{urls}]'"]
    if server_set.router is not None:
        words.append(f"--rollout.router {_public(server_set.router[0], config)}")
    return f"ready; p3o train with: {' '.join(words)}"


def _public(url: str, config: RunConfig) -> str:
    """As others reach it."""
    if config.rollout.launch.host not in _EVERYWHERE:
        return url
    return f"http://{socket.gethostname()}:{url.rpartition(':')[2]}"
