"""Findings as a table and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_p3o.doctor.findings import Finding, Status, exit_code

_STYLES: dict[Status, str] = {
    "ok": "green",
    "fallback": "cyan",
    "warning": "yellow",
    "broken": "bold red",
}


def print_findings(sections: dict[str, list[Finding]], console: Console) -> None:
    """One table a section, then the verdict."""
    for title, findings in sections.items():
        table = Table(title=title, title_justify="left", expand=False, pad_edge=False)
        for column in ("", "", "found", "used", "remedy"):
            table.add_column(column, overflow="fold", no_wrap=column == "")
        for finding in findings:
            style = _STYLES[finding.status]
            words = (finding.found, finding.used, finding.remedy)
            status = f"[{style}]{finding.status}[/]"
            table.add_row(escape(finding.part), status, *map(escape, words))
        console.print(table)
    console.print(escape(verdict([finding for part in sections.values() for finding in part])))


def verdict(findings: Sequence[Finding]) -> str:
    broken = [finding.part for finding in findings if finding.status == "broken"]
    warned = [finding.part for finding in findings if finding.status == "warning"]
    if broken:
        return f"training cannot run here: {', '.join(broken)}"
    return "training can run here" + (f"; see {', '.join(warned)}" if warned else "")


def to_json(sections: dict[str, list[Finding]]) -> dict[str, Any]:
    findings = [finding for part in sections.values() for finding in part]
    return {
        "can_train": exit_code(findings) == 0,
        "verdict": verdict(findings),
        "findings": [
            {"section": title, **asdict(finding)}
            for title, part in sections.items()
            for finding in part
        ],
    }
