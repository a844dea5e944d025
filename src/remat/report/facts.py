"""A report as JSON: everything the page says and draws, in full and without thinning.

In: a `Report`. Out: one object with `summary`, `steps` (as profile files have them), `modules` and `curve`; the format
is in docs/reference/files.md.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from remat.core.document import write_document
from remat.core.files.profile_file import encode_profile
from remat.report.contents.decisions import DecisionTable, TableRow, decisions
from remat.report.contents.details import details
from remat.report.contents.gathered import Report
from remat.report.contents.summary import summarize
from remat.report.tables.sharing import footprint_facts

FORMAT, VERSION = "remat-report", 1


def write_facts(report: Report, path: Path) -> Path:
    write_document(path, facts(report))
    return path


def facts(report: Report) -> dict[str, object]:
    summary, table = summarize(report), decisions(report)
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": report.name,
        "summary": {
            "headline": summary.headline,
            "figures": [asdict(figure) for figure in summary.figures],
            "answers": [asdict(answer) for answer in summary.answers],
        },
        "budget_bytes": report.budget_bytes,
        "steps": [
            {
                "title": title,
                "peak_bytes": step.peak_bytes,
                "peak": {kind.value: size for kind, size in step.breakdown().items()},
                "footprint": footprint_facts(found),
                "profile": encode_profile(step),
            }
            for (title, step), found in zip(report.steps, report.footprints, strict=True)
        ],
        "modules": _rows(table) if table is not None else [],
        "curve": asdict(report.pareto) if report.pareto is not None else None,
        "details": dict(details(report)),
    }


def _rows(table: DecisionTable) -> list[dict[str, object]]:
    def row(found: TableRow) -> dict[str, object]:
        cells = {column.title.lower(): cell for column, cell in zip(table.columns, found.cells, strict=True)}
        return {**cells, "recomputed ops": found.detail.split(", ")} if found.detail else dict(cells)

    return [row(found) for found in table.modules]
