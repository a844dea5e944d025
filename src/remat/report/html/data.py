"""The numbers behind the page's charts, small enough for thousands of ops.

In: a `Report`. Out: one JSON object. Bytes are exact; times are whole nanoseconds; names that occur often stand once in
`strings` and are referred to by number.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from remat.core.results.pareto import Pareto, ParetoPoint
from remat.core.results.profile import MemoryClass, Phase, StepProfile
from remat.report.contents.decisions import DecisionTable, TableRow, decisions
from remat.report.contents.gathered import Report
from remat.report.contents.lifetimes import Life, Panel, lifetimes
from remat.report.contents.palette import slug
from remat.report.contents.samples import phases, sample
from remat.report.contents.summary import short_target

_CLASSES, _PHASES = list(MemoryClass), list(Phase)


@dataclass(slots=True)
class _Strings:
    """Texts by number, each once."""

    numbers: dict[str, int] = field(default_factory=dict)

    def number(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def page_data(report: Report) -> dict[str, object]:
    strings = _Strings()
    table = decisions(report)
    return {
        "name": report.name,
        "budget": report.budget_bytes,
        "classes": [{"name": kind.value, "slug": slug(kind.value)} for kind in MemoryClass],
        "phases": [{"name": phase.value, "slug": slug(phase.value)} for phase in Phase],
        "steps": [_step(title, step, strings) for title, step in report.steps],
        "lifetimes": [_panel(panel) for panel in lifetimes(report)],
        "pareto": _pareto(report.pareto, report) if report.pareto is not None else None,
        "table": _table(table) if table is not None else None,
        "strings": list(strings.numbers),
    }


def _step(title: str, step: StepProfile, strings: _Strings) -> dict[str, object]:
    found = sample(step)
    used = sorted({number for row in found.rows for number in row.largest})
    places = {number: place for place, number in enumerate(used)}
    ops = [step.ops[row.position] for row in found.rows]
    return {
        "title": title,
        "measured": not step.is_estimate,
        "count": len(step.ops),
        "end": round(found.starts_ns[-1]),
        "start": [round(row.start_ns) for row in found.rows],
        "position": [row.position for row in found.rows],
        "target": [strings.number(short_target(op.target)) for op in ops],
        "module": [strings.number(op.module) for op in ops],
        "phase": [_PHASES.index(op.phase) for op in ops],
        "time": [round(found.starts_ns[row.position + 1] - found.starts_ns[row.position]) for row in found.rows],
        "bytes": [[_CLASSES.index(kind), list(line)] for kind, line in found.by_class.items()],
        "largest": [[places[number] for number in row.largest] for row in found.rows],
        "storages": [_storage(step, number, strings) for number in used],
        "peak": found.peak,
        "runs": [[_PHASES.index(run.phase), round(run.start_ns), round(run.end_ns)] for run in phases(step)],
    }


def _storage(step: StepProfile, number: int, strings: _Strings) -> list[int]:
    item = step.storages[number]
    texts = strings.number(short_target(item.name)), strings.number(item.module)
    return [*texts, item.size_bytes, _CLASSES.index(item.kind)]


def _panel(panel: Panel) -> dict[str, object]:
    return {
        "title": panel.title,
        "paired": panel.paired,
        "made": panel.made_count,
        "rows": [
            {
                "name": short_target(row.name),
                "module": row.module,
                "kind": _CLASSES.index(row.kind),
                "size": row.size_bytes,
                "again": round(row.recompute_ns),
                "before": [_life(life) for life in row.before],
                "after": [_life(life) for life in row.after],
            }
            for row in panel.rows
        ],
    }


def _life(life: Life) -> list[int]:
    moments = life.start_ns, life.idle_from_ns, life.idle_to_ns, life.end_ns
    return [*map(round, moments), int(life.recomputed)]


def _pareto(pareto: Pareto, report: Report) -> dict[str, object]:
    plan = report.plan if report.plan is not None and report.plan.schedule is not None else None
    return {
        "plain": pareto.plain_peak_bytes,
        "floor": pareto.floor_bytes,
        "points": [_point(pareto, point) for point in sorted(pareto.points, key=lambda point: point.budget_bytes)],
        "baselines": [_point(pareto, point) for point in pareto.baselines],
        "plan": {"peak": plan.predicted_peak, "overhead": plan.overhead} if plan is not None else None,
    }


def _point(pareto: Pareto, point: ParetoPoint) -> dict[str, object]:
    return {
        "solver": point.solver,
        "budget": point.budget_bytes,
        "peak": point.peak_bytes,
        "overhead": pareto.overhead(point.time_ns),
        "bound": pareto.overhead(point.bound_ns),
        "measuredPeak": point.measured_peak_bytes,
        "measured": None if point.measured_ratio is None else point.measured_ratio - 1,
    }


def _table(table: DecisionTable) -> dict[str, object]:
    return {
        "columns": [
            {"title": column.title, "unit": column.unit.value, "minor": column.minor} for column in table.columns
        ],
        "blocks": [_row(row) for row in table.blocks],
        "modules": [_row(row) for row in table.modules],
    }


def _row(row: TableRow) -> dict[str, object]:
    return {"cells": list(row.cells), "detail": row.detail}
