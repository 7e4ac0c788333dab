"""What the doctor needs to know of a run, beside the machine. Reads; writes nothing."""

import contextlib
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_p3o.api_key import read_api_key
from megatron_p3o.config import RunConfig
from megatron_p3o.doctor.facts import Facts
from megatron_p3o.doctor.servers import ServerFacts, ask_server
from megatron_p3o.doctor.system import existing
from megatron_p3o.errors import UserError
from megatron_p3o.plan import Plan, PlanOptions, make_plan
from megatron_p3o.plan.hardware import GPUS
from megatron_p3o.preflight import check_run

_UNKNOWN_GPU = "h100"  # whose rates are taken; only memory is used here


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """A run on this machine."""

    inputs_problem: str | None = None
    """What `p3o check` says."""
    family: str = ""
    """Of the model."""
    plan: Plan | None = None
    plan_problem: str | None = None
    servers: tuple[ServerFacts, ...] = ()
    busy_ports: tuple[int, ...] = ()
    """Of those that the configuration fixes."""
    run_dir_parent: str = ""
    """What is there of run.dir."""
    is_writable: bool = True


def read_run_facts(config: RunConfig, facts: Facts, *, resume: bool) -> RunFacts:
    inputs_problem, family = None, ""
    try:
        family = check_run(config, resume=resume).architecture.family
    except UserError as error:
        inputs_problem = str(error)
    plan, plan_problem = None, None
    try:
        plan = make_plan(config, plan_options(facts))
    except UserError as error:
        plan_problem = str(error)
    place = existing(Path(config.run.dir))
    return RunFacts(
        inputs_problem=inputs_problem,
        family=family,
        plan=plan,
        plan_problem=plan_problem,
        servers=_ask_servers(config),
        busy_ports=tuple(busy_ports(config.rollout.launch.host, fixed_ports(config))),
        run_dir_parent=str(place),
        is_writable=place.is_dir() and os.access(place, os.W_OK | os.X_OK),
    )


def plan_options(facts: Facts) -> PlanOptions:
    """A plan for nodes like this one."""
    if not facts.torch_gpus or not facts.gpus:
        return PlanOptions(gpus_per_node=max(1, facts.torch_gpus))
    name = facts.gpus[0].name.lower()
    return PlanOptions(
        gpus_per_node=facts.torch_gpus,
        gpu=next((gpu for gpu in GPUS if gpu in name), _UNKNOWN_GPU),
        gpu_memory_gb=min(gpu.memory_bytes for gpu in facts.gpus) / 1e9,
    )


def starts_servers(config: RunConfig) -> bool:
    """Whether `p3o train` starts servers here."""
    rollout = config.rollout
    return rollout.engine == "sglang" and not rollout.servers and rollout.launch.replicas > 0


def fixed_ports(config: RunConfig) -> range:
    """Of servers, router and the router's metrics; none when they are chosen free."""
    launch = config.rollout.launch
    if not starts_servers(config) or launch.port == 0:
        return range(0)
    return range(launch.port, launch.port + launch.replicas + 2)


def busy_ports(host: str, ports: Iterable[int]) -> list[int]:
    """Those that cannot be listened on."""
    busy = []
    for port in ports:
        with contextlib.closing(socket.socket()) as probe:
            # As servers do: a port that was left a moment ago is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except (OSError, OverflowError):
                busy.append(port)
    return busy


def _ask_servers(config: RunConfig) -> tuple[ServerFacts, ...]:
    if config.rollout.engine != "sglang" or not config.rollout.servers:
        return ()
    try:
        key = read_api_key(config.rollout)
    except UserError as error:
        # `check_run` says so too; without its key no server can be asked.
        return tuple(ServerFacts(url=url, problem=str(error)) for url in config.rollout.servers)
    timeout_s = config.rollout.probe_timeout_s
    return tuple(
        ask_server(url, api_key=key, timeout_s=timeout_s) for url in config.rollout.servers
    )
