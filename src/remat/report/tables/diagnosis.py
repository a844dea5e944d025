"""A diagnosis as tables for a terminal, and as facts for programs.

In: a `Diagnosis`. Out: `rich` renderables, plain where the output is no terminal, and a dict for `--json`.
"""

from __future__ import annotations

from dataclasses import asdict

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from remat.core.budget import format_bytes
from remat.core.results.diagnosis import Diagnosis, Finding

_NOT_KNOWN = "not known"


def diagnosis_tables(found: Diagnosis, target: str) -> list[RenderableType]:
    """What is planned and how it went, then what was found, then the verdict."""
    tables: list[RenderableType] = [_facts_table(found, target)]
    tables += [_findings_table(found)] if found.findings else []
    return [*tables, Text(verdict(found) + "\n", style="green" if found.ok else "red")]


def diagnosis_facts(found: Diagnosis, target: str) -> dict[str, object]:
    return {
        "target": target,
        "ok": found.ok,
        "graphs": found.graphs,
        "ops": found.ops,
        "covered": found.covered,
        "saved": found.saved_bytes,
        "unplanned": found.unplanned_bytes,
        "same_bits": found.same_bits,
        "budget": found.budget_bytes,
        "plain_peak": found.plain_peak_bytes,
        "predicted_peak": found.predicted_peak_bytes,
        "measured_peak": found.measured_peak_bytes,
        "captures": list(found.captures),
        "findings": [{**asdict(item), "kind": item.kind.value} for item in found.findings],
    }


def verdict(found: Diagnosis) -> str:
    problems = sum(finding.kind.is_problem for finding in found.findings)
    if not problems:
        return "Everything is planned, gives the same bits and stays within the budget."
    return "1 thing is not as it should be." if problems == 1 else f"{problems} things are not as they should be."


def _facts_table(found: Diagnosis, target: str) -> Table:
    table = Table(title=Text(target), box=box.SIMPLE, show_header=False, title_justify="left", title_style="bold")
    table.add_column(style="dim")
    table.add_column()
    rows = {
        "planned": _planned(found),
        "bits": {True: "the same as in plain PyTorch", False: "differ", None: _NOT_KNOWN}[found.same_bits],
        "plain peak": _size(found.plain_peak_bytes),
        "budget": _size(found.budget_bytes),
        "predicted peak": _size(found.predicted_peak_bytes),
        "measured peak": _size(found.measured_peak_bytes),
        "captured": ", ".join(f"{count} in step {step}" for step, count in enumerate(found.captures, 1) if count)
        or "nothing",
    }
    for name, fact in rows.items():
        table.add_row(name, Text(fact))
    return table


def _planned(found: Diagnosis) -> str:
    if not found.graphs:
        return "nothing"
    graphs = "1 graph" if found.graphs == 1 else f"{found.graphs} graphs"
    if found.covered is None or found.saved_bytes is None:
        return f"{graphs}, {found.ops} ops"
    share = f"{found.covered:.0%} of the {format_bytes(found.saved_bytes)} that plain PyTorch keeps for backward"
    return f"{graphs}, {found.ops} ops: {share}"


def _size(count: int | None) -> str:
    return _NOT_KNOWN if count is None else format_bytes(count)


def _findings_table(found: Diagnosis) -> Table:
    table = Table(box=box.SIMPLE, title="Findings", title_justify="left", title_style="bold", show_lines=True)
    for heading in ("", "what", "what to do"):
        table.add_column(heading, overflow="fold")
    for finding in found.findings:
        table.add_row(
            Text(finding.kind.value, style="red" if finding.kind.is_problem else "yellow"),
            Text(_with_place(finding)),
            Text(finding.advice),
        )
    return table


def _with_place(finding: Finding) -> str:
    return f"{finding.what}\n{finding.place}" if finding.place else finding.what
