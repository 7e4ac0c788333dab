"""The words of `p3o doctor`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megatron_p3o.config import RunConfig, load_config
from megatron_p3o.doctor.dry_run import dry_run
from megatron_p3o.doctor.facts import Facts
from megatron_p3o.doctor.findings import Finding, exit_code
from megatron_p3o.doctor.hardware import hardware_findings
from megatron_p3o.doctor.report import print_findings, to_json
from megatron_p3o.doctor.run import run_findings
from megatron_p3o.doctor.run_facts import read_run_facts, starts_servers
from megatron_p3o.doctor.software import software_findings
from megatron_p3o.doctor.system import read_facts
from megatron_p3o.errors import ConfigurationError

_PIPED_WIDTH = 140  # of a file or a pipe, which has no width of its own


def doctor(
    context: typer.Context,
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN.yaml]", help="A run to be checked too.")
    ] = None,
    sglang_python: Annotated[
        str | None,
        typer.Option(help="SGLang's interpreter, else this one; a run names its own."),
    ] = None,
    one_step: Annotated[
        bool, typer.Option("--dry-run", help="Also do one step, in a temporary directory.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="The run will continue its run dir.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds for each package to be imported.")
    ] = 120.0,
    dry_run_timeout: Annotated[float, typer.Option(min=1, help="Seconds for the step.")] = 1800.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print findings as JSON.")] = False,
) -> None:
    """Say whether this machine can train, and a run on it. Exit code 0: yes; 1: no."""
    if run is None and (context.args or one_step or resume):
        word = context.args[0] if context.args else "--dry-run" if one_step else "--resume"
        raise ConfigurationError(
            f"{word!r} speaks of a run, and none is given; write p3o doctor RUN.yaml {word}"
        )
    config = None if run is None else load_config(run, context.args)
    facts = _read(config, sglang_python, timeout)
    sections = {"software": software_findings(facts), "machine": hardware_findings(facts)}
    output = ""
    if config is not None and run is not None:
        found = read_run_facts(config, facts, resume=resume)
        sections[run] = run_findings(config, facts, found)
        if one_step:
            finding, output = _try_step(config, run, context.args, sections, dry_run_timeout)
            sections[run].append(finding)
    if as_json:
        print(json.dumps(to_json(sections), indent=2))
    else:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)
        print_findings(sections, console)
    if output:
        print(f"\noutput of the dry run:\n{output}", file=sys.stderr)
    raise typer.Exit(exit_code(finding for part in sections.values() for finding in part))


def _read(config: RunConfig | None, sglang_python: str | None, timeout_s: float) -> Facts:
    if config is None:
        return read_facts(sglang_python=sglang_python, disk=Path(), timeout_s=timeout_s)
    if starts_servers(config):
        sglang_python = config.rollout.launch.python
    return read_facts(
        sglang_python=sglang_python,
        disk=Path(config.run.dir),
        timeout_s=timeout_s,
    )


def _try_step(
    config: RunConfig,
    run: str,
    overrides: list[str],
    sections: dict[str, list[Finding]],
    timeout_s: float,
) -> tuple[Finding, str]:
    findings = [finding for part in sections.values() for finding in part]
    if exit_code(findings) or any(f.part == "layout" and "nodes" in f.used for f in findings):
        remedy = "mend what is broken first; a run on several nodes cannot be tried on one"
        return Finding(part="dry run", status="warning", found="not tried", remedy=remedy), ""
    return dry_run(config, run, overrides, timeout_s)
