"""Place a run's trainers and SGLang servers on an existing Ray cluster, and run them to the end.

    python tools/ray_launch.py RUN.yaml --trainer-nodes 4 --server-nodes 4 --gpus-per-node 8 \
        [--section.field VALUE ...]

One placement group holds a bundle for each node: trainer nodes run torchrun's ranks of `p3o train`,
server nodes `p3o serve` with the `rollout.launch` of RUN.yaml. The present directory, the model and
the run dir must be at the same paths on every node. Ray only places and watches: trainers find each
other by torchrun, and servers by their URLs. Needs `pip install 'megatron-p3o[ray]'`.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import ray
import typer
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatron_p3o.config import RunConfig, load_config
from megatron_p3o.errors import ConfigurationError, UserError
from megatron_p3o.parent import guard_words

_POLL_S = 1.0
_STOP_TIMEOUT_S = 30.0
_CLI = ("-m", "megatron_p3o.cli")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Node:
    """What runs in one bundle: a single process at a time, which ends with this actor."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        return ray.util.get_node_ip_address()

    def free_port(self) -> int:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def start(self, words: list[str], environment: dict[str, str], directory: str) -> None:
        """Run this node's Python with the given words; its output goes to Ray's."""
        self._process = subprocess.Popen(
            guard_words([sys.executable, *words]),
            env={**os.environ, **environment},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def exit_code(self) -> int | None:
        assert self._process is not None
        return self._process.poll()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def main(
    context: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN.yaml")],
    trainer_nodes: Annotated[int, typer.Option(help="Nodes that train.")] = 1,
    server_nodes: Annotated[int, typer.Option(help="Nodes that serve.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs that each bundle takes.")] = 8,
    cpus_per_node: Annotated[int, typer.Option(help="CPUs that each bundle takes.")] = 8,
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Trainer ranks of a node; as many as GPUs if left out.")
    ] = None,
    strategy: Annotated[
        str, typer.Option(help="Ray's; STRICT_SPREAD gives every bundle a node of its own.")
    ] = "STRICT_SPREAD",
    address: Annotated[str, typer.Option(help="Of the Ray cluster.")] = "auto",
) -> None:
    """Run RUN.yaml on a Ray cluster. Override any field: --section.field VALUE."""
    try:
        config = load_config(run, context.args)
        check(config, trainer_nodes, server_nodes)
    except UserError as error:
        print(f"ray_launch: {error}", file=sys.stderr)
        sys.exit(2)
    ray.init(address=address)
    bundle = {"CPU": cpus_per_node, **({"GPU": gpus_per_node} if gpus_per_node else {})}
    group = placement_group([bundle] * (trainer_nodes + server_nodes), strategy=strategy)
    try:
        ray.get(group.ready())
        nodes = [_node(group, index, bundle) for index in range(trainer_nodes + server_nodes)]
        code = _run(
            config,
            [run, *context.args],
            nodes[:trainer_nodes],
            nodes[trainer_nodes:],
            ranks_per_node=ranks_per_node or gpus_per_node,
        )
    finally:
        remove_placement_group(group)
        ray.shutdown()
    sys.exit(code)


def check(config: RunConfig, trainer_nodes: int, server_nodes: int) -> None:
    """Raises ConfigurationError when this cannot run on servers of its own."""
    if config.rollout.engine != "sglang" or not config.rollout.launch.replicas:
        raise ConfigurationError(
            f"rollout.engine={config.rollout.engine} with rollout.launch.replicas="
            f"{config.rollout.launch.replicas} starts no servers; set engine=sglang and the "
            "number of servers on each server node"
        )
    if min(trainer_nodes, server_nodes) < 1:
        raise ConfigurationError(
            f"--trainer-nodes={trainer_nodes} and --server-nodes={server_nodes} must be >= 1"
        )


def serve_words(run: Sequence[str], address: str, port: int, *, logs: str) -> list[str]:
    """Of a server node."""
    place = ["--rollout.launch.host", address, "--rollout.launch.port", str(port)]
    return [*_CLI, "serve", *run, *place, "--logs", logs]


def train_words(
    run: Sequence[str],
    urls: Sequence[str],
    *,
    node: int,
    num_nodes: int,
    ranks_per_node: int,
    master: tuple[str, int],
) -> list[str]:
    """Of a trainer node."""
    torchrun = [
        *("-m", "torch.distributed.run", "--nnodes", str(num_nodes), "--node-rank", str(node)),
        *("--nproc-per-node", str(ranks_per_node)),
        *("--master-addr", master[0], "--master-port", str(master[1])),
    ]
    servers = ["--rollout.servers", f"[{', '.join(urls)}]"]
    return [*torchrun, *_CLI, "train", *run, *servers]


def _node(group: PlacementGroup, index: int, bundle: Mapping[str, int]) -> Any:
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=index
    )
    actor = ray.remote(Node).options(
        num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), scheduling_strategy=strategy
    )
    return actor.remote()


def _run(
    config: RunConfig,
    run: Sequence[str],
    trainers: Sequence[Any],
    servers: Sequence[Any],
    *,
    ranks_per_node: int,
) -> int:
    """Until all trainers have ended, or one has failed; the exit code."""
    environment, directory = _forwarded(config), os.getcwd()
    urls = []
    for node in servers:
        host, port = ray.get(node.address.remote()), ray.get(node.free_port.remote())
        words = serve_words(run, host, port, logs=f"{config.run.dir}.servers/{host}-{port}")
        ray.get(node.start.remote(words, environment, directory))
        urls += [f"http://{host}:{port + n}" for n in range(config.rollout.launch.replicas)]
    master = (ray.get(trainers[0].address.remote()), ray.get(trainers[0].free_port.remote()))
    for number, node in enumerate(trainers):
        words = train_words(
            run,
            urls,
            node=number,
            num_nodes=len(trainers),
            ranks_per_node=ranks_per_node,
            master=master,
        )
        ray.get(node.start.remote(words, environment, directory))
    try:
        while True:
            codes = ray.get([node.exit_code.remote() for node in trainers])
            failed = [code for code in codes if code]
            if failed or None not in codes:
                return failed[0] if failed else 0
            time.sleep(_POLL_S)
    finally:
        ray.get([node.stop.remote() for node in (*trainers, *servers)])


def _forwarded(config: RunConfig) -> dict[str, str]:
    """The API key, which the configuration only names."""
    name = config.rollout.api_key_env
    return {} if name is None or name not in os.environ else {name: os.environ[name]}


if __name__ == "__main__":
    app()
