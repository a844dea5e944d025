"""What was decided, module by module: the rows of the report's table.

In: a `Report`. Out: a `DecisionTable` of numbers with the name and unit of each column, by block and by module. Without
a plan the table says what each module costs instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from remat.core.results.explain import ModuleRow, explain_modules
from remat.core.results.plan import Plan
from remat.core.results.profile import StepProfile
from remat.report.contents.gathered import Report


class Unit(StrEnum):
    TEXT = "text"
    COUNT = "count"
    BYTES = "bytes"
    TIME = "time"
    SHARE = "share"


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    unit: Unit
    explanation: str
    minor: bool = False
    """Left out where there is little room."""


@dataclass(frozen=True, slots=True)
class TableRow:
    cells: tuple[str | float, ...]
    detail: str = ""
    """More about the first cell, searched like it."""


@dataclass(frozen=True, slots=True)
class DecisionTable:
    title: str
    columns: tuple[Column, ...]
    blocks: tuple[TableRow, ...]
    """Few rows: the parts of the model; empty where they are the same as the modules."""
    modules: tuple[TableRow, ...]


_PLAN_COLUMNS = (
    Column("Module", Unit.TEXT, "A part of the model, by its name in the model's code"),
    Column("Kept before", Unit.BYTES, "What the plain step keeps from forward for backward", minor=True),
    Column("Kept after", Unit.BYTES, "What the planned step keeps"),
    Column("Recomputed", Unit.COUNT, "Operators that run again", minor=True),
    Column("of ops", Unit.COUNT, "Operators of this module, forward and backward", minor=True),
    Column("Extra time", Unit.TIME, "What running them again takes"),
    Column("of step", Unit.SHARE, "That time as a share of the plain step", minor=True),
)
_PROFILE_COLUMNS = (
    Column("Module", Unit.TEXT, "A part of the model, by its name in the model's code"),
    Column("At the peak", Unit.BYTES, "What it has in memory when most is in use"),
    Column("Kept for backward", Unit.BYTES, "Activations that wait for backward"),
    Column("Parameters", Unit.BYTES, "Its own parameters, children not included", minor=True),
    Column("Ops", Unit.COUNT, "Operators it runs", minor=True),
    Column("Time", Unit.TIME, "What these take together"),
)


def decisions(report: Report) -> DecisionTable | None:
    if report.plan is not None and report.plan.schedule is not None:
        return _of_plan(report.plan)
    return _of_profile(report.before) if report.before is not None else None


def _of_plan(plan: Plan) -> DecisionTable:
    blocks, modules = _plan_rows(plan.explain().rows), _plan_rows(explain_modules(plan).rows)
    same = [row.cells for row in blocks] == [row.cells for row in modules]
    return DecisionTable("What is kept and what is recomputed", _PLAN_COLUMNS, () if same else blocks, modules)


def _plan_rows(rows: Iterable[ModuleRow]) -> tuple[TableRow, ...]:
    return tuple(
        TableRow(
            (
                row.module,
                row.plain_kept_bytes,
                row.kept_bytes,
                len(row.recomputed),
                row.op_count,
                row.recompute_time_ns,
                row.share,
            ),
            ", ".join(row.recomputed),
        )
        for row in rows
    )


def _of_profile(step: StepProfile) -> DecisionTable:
    rows = tuple(
        TableRow(
            (
                row.module or "(no module)",
                row.at_peak_bytes,
                row.activation_bytes,
                row.parameter_bytes,
                row.op_count,
                row.time_ns,
            )
        )
        for row in step.modules()
    )
    return DecisionTable("What each module costs", _PROFILE_COLUMNS, (), rows)
