"""Findings about one run on this machine."""

from megatron_p3o import tested_versions
from megatron_p3o.config import RunConfig
from megatron_p3o.doctor.facts import ABSENT, Facts
from megatron_p3o.doctor.findings import Finding, gigabytes
from megatron_p3o.doctor.run_facts import RunFacts, fixed_ports, starts_servers
from megatron_p3o.doctor.servers import ServerFacts
from megatron_p3o.parallel.fp8_support import missing_support
from megatron_p3o.plan import Plan
from megatron_p3o.plan.memory import StageMemory

_OPTIMIZER_BYTES = 12
"""Of each parameter in a checkpoint: an fp32 copy and both moments, beside the weight itself."""
_SHOWN_PARTS = 4


def run_findings(config: RunConfig, facts: Facts, run: RunFacts) -> list[Finding]:
    return [
        check_inputs(run),
        check_layout(config, facts, run),
        check_precision(config, facts),
        check_memory(facts, run),
        *check_plan(facts, run),
        *check_servers(config, run),
        *check_launch(config, facts),
        *check_ports(config, run),
        check_run_dir(config, facts, run),
    ]


def check_inputs(run: RunFacts) -> Finding:
    part = "p3o check"
    if run.inputs_problem is not None:
        return _told(part, run.inputs_problem)
    return Finding(part=part, status="ok", found=f"{run.family}: model, data and reward are there")


def check_layout(config: RunConfig, facts: Facts, run: RunFacts) -> Finding:
    """Ranks, and GPUs of servers that are started here, against the GPUs."""
    part = "layout"
    if run.plan is None and run.plan_problem == run.inputs_problem:
        return Finding(part=part, status="warning", found="not compared", remedy="see p3o check")
    if run.plan is None:
        return _told(part, str(run.plan_problem))
    ranks, gpus = run.plan.layout.world_size, facts.torch_gpus
    if not gpus:
        few = ranks > facts.usable_cores
        return Finding(
            part=part,
            status="warning" if few else "ok",
            found=f"{ranks} ranks, {facts.usable_cores:g} CPU cores",
            used="the CPU",
            remedy="lower layout.data: ranks share cores" if few else "",
        )
    servers = 0
    if starts_servers(config):
        servers = config.rollout.launch.replicas * config.rollout.launch.tensor_parallel_size
    found = f"{ranks} ranks" + (f" and {servers} GPUs of servers" if servers else "")
    found += f", {gpus} GPUs here"
    if ranks <= gpus and ranks + servers <= gpus:
        idle = gpus - ranks - servers
        used = "all GPUs" if not idle else f"all but {idle} GPUs"
        return Finding(part=part, status="ok", found=found, used=used)
    if ranks > gpus and ranks % gpus == 0:
        return Finding(
            part=part,
            status="warning",
            found=found,
            used=f"{ranks // gpus} nodes like this one",
            remedy=f"start it with torchrun or Slurm on {ranks // gpus} nodes; p3o train alone "
            "starts every rank here",
        )
    remedy = f"make layout.data x {config.layout.model_parallel_size} at most {gpus - servers}"
    if gpus - servers < config.layout.model_parallel_size:
        remedy = "use fewer servers (rollout.launch.replicas) or a smaller layout, or more GPUs"
    elif config.layout.data is None:
        remedy += "; left out, layout.data takes every GPU"
    return Finding(part=part, status="broken", found=found, remedy=remedy)


def check_precision(config: RunConfig, facts: Facts) -> Finding:
    precision, part = config.precision, "precision"
    found = f"trainer {precision.trainer}, rollout {precision.rollout}"
    if not precision.trainer_is_fp8:
        return Finding(part=part, status="ok", found=found, used=precision.trainer)
    if facts.capability is None:
        return Finding(part=part, status="fallback", found=found, used="emulated FP8, for studies")
    problem = missing_support(
        precision.fp8_recipe,
        facts.capability,
        has_transformer_engine=facts.package("transformer-engine").works,
    )
    if problem is None:
        return Finding(part=part, status="ok", found=found, used="Transformer Engine")
    return Finding(part=part, status="broken", found=found, remedy=problem)


def check_memory(facts: Facts, run: RunFacts) -> Finding:
    """The plan's bytes against a GPU's, or against this machine's memory."""
    part = "memory"
    if run.plan is None:
        return Finding(part=part, status="warning", found="not estimated", remedy="see above")
    worst = run.plan.worst_stage
    largest = _largest_parts(worst)
    if not facts.torch_gpus:
        needed = (worst.total - worst.allowance) * run.plan.layout.world_size
        is_enough = needed <= facts.usable_memory_bytes
        return Finding(
            part=part,
            status="ok" if is_enough else "warning",
            found=f"about {gigabytes(needed)} of {gigabytes(facts.usable_memory_bytes)} for all "
            f"ranks at the longest sequence: {largest}",
            used="an estimate",
            remedy=""
            if is_enough
            else "lower train.microbatch_size, layout.data, or data.max_prompt_tokens where "
            "prompts are shorter",
        )
    fits = worst.total <= run.plan.memory_bytes
    return Finding(
        part=part,
        status="ok" if fits else "broken",
        found=f"about {gigabytes(worst.total)} of {gigabytes(run.plan.memory_bytes)} on a GPU of "
        f"stage {worst.stage}: {largest}",
        used="an estimate; p3o plan has all parts",
        remedy="" if fits else run.plan.warnings[0],
    )


def _largest_parts(stage: StageMemory) -> str:
    parts = stage.resident | stage.phases[stage.peak_phase]
    largest = sorted(parts, key=lambda part: -parts[part])[:_SHOWN_PARTS]
    return ", ".join(f"{part} {gigabytes(parts[part])}" for part in largest)


def check_plan(facts: Facts, run: RunFacts) -> list[Finding]:
    """The plan's other warnings, which speak of GPUs."""
    if run.plan is None or not facts.torch_gpus:
        return []
    of_memory = run.plan.worst_stage.total > run.plan.memory_bytes
    return [
        Finding(part="p3o plan", status="warning", found=warning)
        for warning in run.plan.warnings[int(of_memory) :]
    ]


def check_servers(config: RunConfig, run: RunFacts) -> list[Finding]:
    return [_check_server(config, server) for server in run.servers]


def _check_server(config: RunConfig, server: ServerFacts) -> Finding:
    if server.problem is not None:
        return Finding(
            part=server.url,
            status="broken",
            found=server.problem,
            remedy="start it (p3o serve), or correct rollout.servers",
        )
    found = f"SGLang {server.version}, {server.tensor_parallel_size} x {server.device}"
    if server.version in tested_versions.SGLANG:
        return Finding(part=server.url, status="ok", found=found, used="tested")
    is_allowed = config.rollout.allow_untested_version
    return Finding(
        part=server.url,
        status="warning" if is_allowed else "broken",
        found=found,
        used="not a tested version",
        remedy=f"install {tested_versions.SGLANG[-1]}"
        + ("" if is_allowed else ", or set rollout.allow_untested_version=true"),
    )


def check_launch(config: RunConfig, facts: Facts) -> list[Finding]:
    """SGLang in the interpreter that servers are started with."""
    if not starts_servers(config):
        return []
    part, package = "rollout.launch.python", facts.sglang.get("sglang", ABSENT)
    if not package.works:
        why = package.problem or "sglang is not installed"
        return [
            Finding(
                part=part,
                status="broken",
                found=f"{facts.sglang_interpreter}: {why}",
                remedy="name the interpreter of SGLang's environment (on a CPU: make sglang, "
                ".venv-sglang/bin/python)",
            )
        ]
    router = facts.sglang.get("sglang-router", ABSENT)
    if config.rollout.launch.router and not router.works:
        return [
            Finding(
                part=part,
                status="broken",
                found=f"{facts.sglang_interpreter} has no working sglang-router",
                remedy=f"pip install sglang-router=={tested_versions.SGLANG_ROUTER[-1]} there, or "
                "set rollout.launch.router=false",
            )
        ]
    is_tested = package.version in tested_versions.SGLANG
    is_refused = not is_tested and not config.rollout.allow_untested_version
    return [
        Finding(
            part=part,
            status="broken" if is_refused else "ok" if is_tested else "warning",
            found=f"SGLang {package.version} in {facts.sglang_interpreter}",
            used="tested" if is_tested else "not a tested version",
            remedy=f"install {tested_versions.SGLANG[-1]}, or set "
            "rollout.allow_untested_version=true"
            if is_refused
            else "",
        )
    ]


def check_ports(config: RunConfig, run: RunFacts) -> list[Finding]:
    ports = fixed_ports(config)
    if not ports:
        return []
    found = f"{ports[0]} to {ports[-1]} on {config.rollout.launch.host}"
    if not run.busy_ports:
        return [Finding(part="ports", status="ok", found=f"{found} are free")]
    return [
        Finding(
            part="ports",
            status="broken",
            found=f"{found}: in use or not allowed: {', '.join(map(str, run.busy_ports))}",
            remedy="choose another rollout.launch.port; 0 takes free ones",
        )
    ]


def check_run_dir(config: RunConfig, facts: Facts, run: RunFacts) -> Finding:
    part = "run.dir"
    if not run.is_writable:
        return Finding(
            part=part,
            status="broken",
            found=f"{run.run_dir_parent} is no directory that can be written to",
            remedy="choose another run.dir, or change its permissions",
        )
    free = facts.disk.free_bytes
    if run.plan is None:
        return Finding(part=part, status="ok", found=f"{gigabytes(free)} free")
    needed = disk_bytes(config, run.plan)
    is_enough = needed <= free
    return Finding(
        part=part,
        status="ok" if is_enough else "broken",
        found=f"{gigabytes(needed)} for checkpoints and weights, {gigabytes(free)} free at "
        f"{facts.disk.path}",
        used="samples and metrics come on top",
        remedy="" if is_enough else "make room, lower checkpoint.keep, or choose another run.dir",
    )


def disk_bytes(config: RunConfig, plan: Plan) -> int:
    """Of all checkpoints that are there at once, one more than is kept while it is written, and of
    two versions of the weights where servers read them from files in the run dir."""
    trainer_bytes = 4 if config.precision.trainer == "fp32" else 2
    checkpoint = plan.parameters.total * (trainer_bytes + _OPTIMIZER_BYTES)
    needed = (config.checkpoint.keep + 1) * checkpoint if config.checkpoint.every else 0
    publish = config.rollout.publish
    if publish.transport == "disk" and publish.directory is None:
        needed += 2 * plan.sync.bytes_per_server
    return needed


def _told(part: str, problem: str) -> Finding:
    """An error's message, with its remedy apart where it has one."""
    found, _, remedy = problem.rpartition("; ")
    if not found:
        found, remedy = problem, ""
    return Finding(part=part, status="broken", found=found, remedy=remedy)
