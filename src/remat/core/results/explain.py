"""What a plan does, in words: what each part of the model keeps and recomputes, and how other strategies fare.

In: a plan. Out: an `Explanation` (one row for each part of the model) or a `Comparison` (one row for each strategy);
`str` of either is plain text for a terminal.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from remat.core.budget import format_bytes
from remat.core.copies import copies_of, without_copies
from remat.core.graph import Op
from remat.core.results.plan import Plan
from remat.core.schedule import Schedule, plain_schedule
from remat.core.search.limits import Limits
from remat.core.simulate import simulate
from remat.core.solution import Solution, Status
from remat.errors import UnknownName

DEFAULT_SOLVERS = ("none", "full", "sqrt_n", "selective")


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One part of the model; `share` is its recomputation as a share of the plain step's time."""

    module: str
    op_count: int
    kept_bytes: int
    plain_kept_bytes: int
    """What the plain step keeps for backward."""
    recomputed: tuple[str, ...]
    """Names of the ops that run again; one that runs again several times is listed once."""
    recompute_time_ns: float
    share: float
    offloaded: tuple[str, ...] = ()
    """Names of the ops whose values spend a while on the host."""
    offloaded_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Explanation:
    module: str
    rows: tuple[ModuleRow, ...]
    status: Status

    @property
    def kept_bytes(self) -> int:
        return sum(row.kept_bytes for row in self.rows)

    @property
    def offloaded_bytes(self) -> int:
        return sum(row.offloaded_bytes for row in self.rows)

    @property
    def recompute_time_ns(self) -> float:
        return sum(row.recompute_time_ns for row in self.rows)

    @property
    def share(self) -> float:
        return sum(row.share for row in self.rows)

    def __str__(self) -> str:
        title = self.module or "the whole step"
        kept = format_bytes(self.kept_bytes)
        away = f", copies {format_bytes(self.offloaded_bytes)} to the host" if self.offloaded_bytes else ""
        again = f"recomputes {self.share:.2%} of the step"
        lines = [f"{title}: keeps {kept} for backward{away}, {again} ({self.status.value})."]
        width = max((len(row.module) for row in self.rows), default=0)
        for row in self.rows:
            names = ", ".join(row.recomputed[:6]) + (", …" if len(row.recomputed) > 6 else "")
            again = (
                f"recomputes {len(row.recomputed)} of {row.op_count} ops ({names})" if names else "recomputes nothing"
            )
            away = f", copies {format_bytes(row.offloaded_bytes)} to the host" if row.offloaded else ""
            kept = format_bytes(row.kept_bytes)
            lines.append(f"  {row.module:{width}}  keeps {kept:>10}  {row.share:6.2%}  {again}{away}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    solver: str
    status: Status
    peak_bytes: int
    overhead: float
    fits: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    budget_bytes: int
    rows: tuple[ComparisonRow, ...]

    def __str__(self) -> str:
        width = max(len("solver"), *(len(row.solver) for row in self.rows))
        lines = [
            f"budget {format_bytes(self.budget_bytes)}",
            f"{'solver':{width}}  {'status':10}  {'peak':>10}  {'overhead':>8}  fits",
        ]
        for row in self.rows:
            lines.append(
                f"{row.solver:{width}}  {row.status.value:10}  {format_bytes(row.peak_bytes):>10}  "
                f"{row.overhead:8.2%}  {'yes' if row.fits else 'no'}"
            )
        return "\n".join(lines)


def explain(plan: Plan, module: str = "") -> Explanation:
    """One row for each direct part of `module`, or a row for itself where it has none."""
    ops = plan.problem.graph.ops
    inside = [number for number, op in enumerate(ops) if _is_inside(op, module) and op.transfer is None]
    if module and not inside:
        raise UnknownName(_unknown_module(ops, module))
    return Explanation(
        module, _rows(plan, {number: _part(ops[number].module, module) for number in inside}), plan.status
    )


def explain_modules(plan: Plan) -> Explanation:
    """One row for each module that computes something itself, however deep it lies."""
    names = {number: op.module for number, op in enumerate(plan.problem.graph.ops) if op.transfer is None}
    return Explanation("", _rows(plan, names), plan.status)


def compare(plan: Plan, solvers: Sequence[str] = (), *, time_limit_s: float = 10.0) -> Comparison:
    """This plan beside other strategies on the same problem; strategies over the budget are listed with their peak."""
    from remat.solvers import get_solver

    rows = [_comparison_row(plan, plan.solution)]
    for name in solvers or DEFAULT_SOLVERS:
        rows.append(_comparison_row(plan, get_solver(name).solve(without_copies(plan.problem), Limits(time_limit_s))))
    return Comparison(plan.budget_bytes, tuple(rows))


def _comparison_row(plan: Plan, solution: Solution) -> ComparisonRow:
    base = plan.plain_time_ns
    return ComparisonRow(
        solver=solution.solver,
        status=solution.status,
        peak_bytes=solution.peak_bytes,
        overhead=solution.time_ns / base - 1 if base > 0 else 0.0,
        fits=solution.status is not Status.INFEASIBLE,
    )


def _is_inside(op: Op, module: str) -> bool:
    return not module or op.module == module or op.module.startswith(f"{module}.")


def _part(path: str, module: str) -> str:
    """The direct part of `module` that `path` lies in; a numbered part of a list keeps its number, as `layers.3`."""
    depth = len(module.split(".")) if module else 0
    pieces = path.split(".")
    if len(pieces) > depth + 1 and pieces[depth + 1].isdigit():
        depth += 1
    return ".".join(pieces[: depth + 1])


def _unknown_module(ops: Sequence[Op], module: str) -> str:
    known: dict[str, None] = {}
    for op in ops:
        pieces = op.module.split(".")
        known.update((".".join(pieces[:depth]), None) for depth in range(1, len(pieces) + 1))
    close = difflib.get_close_matches(module, known, n=5, cutoff=0.3) or [name for name in known if name][:5]
    hint = f"did you mean {', '.join(close)}?" if close else "this plan knows no modules."
    return f"The plan has no module `{module}`; {hint}"


def _rows(plan: Plan, names: Mapping[int, str]) -> tuple[ModuleRow, ...]:
    """The ops of each name together, in the order in which names first occur."""
    parts: dict[str, list[int]] = {}
    for number, name in names.items():
        parts.setdefault(name, []).append(number)
    kept, plain = _kept_bytes(plan, plan.schedule), _kept_bytes(plan, plain_schedule(plan.problem.graph))
    again, away = _runs_again(plan), _away(plan)
    return tuple(
        _row(plan, name or "(no module)", numbers, kept, plain, again, away) for name, numbers in parts.items()
    )


def _away(plan: Plan) -> dict[int, int]:
    """For each op, the bytes of its values that spend a while on the host."""
    producers, result = plan.problem.graph.producers(), Counter[int]()
    for value in copies_of(plan.problem.graph):
        result[producers[value]] += plan.problem.costs.size_bytes[value]
    return dict(result)


def _kept_bytes(plan: Plan, schedule: Schedule | None) -> dict[int, int]:
    """Bytes that each op's outputs hold across the start of backward (across the peak, where there is none)."""
    if schedule is None:
        return {}
    ops = plan.problem.graph.ops
    timeline = simulate(plan.problem, schedule)
    backward = (step for step, number in enumerate(schedule.steps) if ops[number].backward)
    boundary = next(backward, max(timeline.peak_step, 0))
    result: Counter[int] = Counter()
    for step, number in enumerate(schedule.steps[:boundary]):
        for value, last in zip(ops[number].outputs, timeline.last_uses[step], strict=True):
            if last >= boundary:
                result[number] += plan.problem.costs.size_bytes[value]
    return dict(result)


def _runs_again(plan: Plan) -> dict[int, int]:
    return {} if plan.schedule is None else {int(op): count for op, count in plan.schedule.recomputed().items()}


def _row(
    plan: Plan,
    name: str,
    numbers: Sequence[int],
    kept: dict[int, int],
    plain: dict[int, int],
    again: dict[int, int],
    away: dict[int, int],
) -> ModuleRow:
    time = sum(plan.problem.costs.time_ns[number] * again.get(number, 0) for number in numbers)
    base = plan.plain_time_ns
    return ModuleRow(
        module=name,
        op_count=len(numbers),
        kept_bytes=sum(kept.get(number, 0) for number in numbers),
        plain_kept_bytes=sum(plain.get(number, 0) for number in numbers),
        recomputed=tuple(plan.problem.graph.ops[number].name for number in numbers if number in again),
        recompute_time_ns=time,
        share=time / base if base > 0 else 0.0,
        offloaded=tuple(plan.problem.graph.ops[number].name for number in numbers if number in away),
        offloaded_bytes=sum(away.get(number, 0) for number in numbers),
    )
