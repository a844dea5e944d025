"""The body of a scan as a problem of its own, and the frontier of what its iterations can save.

In: a scan's equation and which of its inputs are differentiated. Out: a `Body` with its `BodyPlan`s: bytes saved by an
iteration against the time of one, from all that backward reads down to the carry alone. The end of forward is given a
workspace, so that what lives across it is small although the body itself may use more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from remat.core.files.plan_file import graph_hash
from remat.core.graph import OpId
from remat.core.memory_rules import CPU
from remat.core.problem import LARGEST_BYTES, Costs, Problem
from remat.core.results.plan import PlannedScan, ScanRun
from remat.core.schedule import Schedule, plain_schedule
from remat.core.simulate import simulate
from remat.core.validate import validate
from remat.errors import InfeasibleBudget, InvalidSchedule, PlanMismatch
from remat.jax import _compat
from remat.jax.costs.op_costs import measured_costs
from remat.jax.costs.timing import Stopwatch
from remat.jax.graph.capture import JoinedStep, capture
from remat.jax.graph.contract import FusedGraph, contract
from remat.jax.run.cuts import segment_numbers
from remat.jax.run.replay import Replay, cut_segments

POINTS = 10
POINT_S = 0.6
"""At most for each point of the frontier."""
ROOM = 1.15
"""Of the body's plain peak: what an iteration may use while it runs."""


@dataclass(frozen=True, slots=True)
class ScanShape:
    """How a scan's inputs are divided."""

    constants: int
    carries: int
    length: int
    reverse: bool

    @staticmethod
    def of(params: dict[str, Any]) -> ScanShape:
        return ScanShape(*_compat.scan_parts(params), params["length"], params["reverse"])


@dataclass(frozen=True, slots=True)
class BodyPlan:
    """One way to run an iteration forward and backward."""

    saved_bytes: int
    time_ns: float
    replay: Replay
    schedule: Schedule


@dataclass(frozen=True, slots=True)
class Body:
    shape: ScanShape
    captured: JoinedStep
    graph_hash: str
    frontier: tuple[BodyPlan, ...]
    """From the one that saves most to the leanest; each is on the lower convex hull of time against bytes."""
    others: tuple[BodyPlan, ...] = ()
    """Beside the hull, for what whole steps along it leave over."""

    @property
    def leanest(self) -> BodyPlan:
        return self.frontier[-1]


def plan_body(params: dict[str, Any], perturbed: Sequence[bool], watch: Stopwatch) -> Body:
    """Capture the body, and solve it for several amounts of saved bytes."""
    captured, contracted, problem = _body_problem(params, perturbed, watch)
    digest = graph_hash(problem.graph, problem.costs.size_bytes)
    points = _points(contracted, problem)
    return Body(ScanShape.of(params), captured, digest, _hull(points), tuple(points))


def body_under(
    params: dict[str, Any], perturbed: Sequence[bool], watch: Stopwatch, scan: PlannedScan
) -> tuple[Body, list[BodyPlan]]:
    """The body under schedules that were found before, one for each run; refused where they are for another body."""
    captured, contracted, problem = _body_problem(params, perturbed, watch)
    digest, shape = graph_hash(problem.graph, problem.costs.size_bytes), ScanShape.of(params)
    if digest != scan.graph_hash or sum(run.count for run in scan.runs) != shape.length:
        raise PlanMismatch(f"The plan was made for another function: its scan {scan.site} has another body or length.")
    plans = [_plan(contracted, problem, _checked(problem, run, scan.site)) for run in scan.runs]
    return Body(shape, captured, digest, tuple(plans)), plans


def _checked(problem: Problem, run: ScanRun, site: int) -> Schedule:
    schedule = Schedule(tuple(OpId(step) for step in run.steps))
    try:
        validate(problem.with_budget(LARGEST_BYTES), schedule, keep_order=False)
    except InvalidSchedule as error:
        raise PlanMismatch(f"The plan's schedule for scan {site} is not valid: {error} Make the plan again.") from error
    return schedule


def _body_problem(
    params: dict[str, Any], perturbed: Sequence[bool], watch: Stopwatch
) -> tuple[JoinedStep, FusedGraph, Problem]:
    shape, jaxpr = ScanShape.of(params), params["jaxpr"]
    carries = range(shape.constants, shape.constants + shape.carries)
    wanted = [
        _compat.is_differentiable(aval) and (place in carries or perturbed[place])
        for place, aval in enumerate(jaxpr.in_avals)
    ]
    run = _compat.as_function(jaxpr)
    captured = capture(lambda *values: list(map(_left, run(*values))), jaxpr.in_avals, wanted)
    carried = [captured.program.arguments[place] for place in carries]
    contracted = contract(captured.program, carried)
    return captured, contracted, Problem(contracted.graph, measured_costs(contracted, watch), 0)


def _left(result: Any) -> Any:
    """What leaves an iteration is one value, what backward reads of it another: to keep that takes memory.

    The results of a whole step are there whatever backward does; a carry is overwritten by the next iteration.
    """
    return jnp.copy(result) if _compat.is_differentiable(jax.typeof(result)) else result


def _points(contracted: FusedGraph, problem: Problem) -> list[BodyPlan]:
    plain = plain_schedule(problem.graph)
    peak = simulate(problem, plain).peak_bytes
    first = _plan(contracted, problem, plain)
    found = [first]
    for number in range(1, POINTS + 1):
        allowed = int(first.saved_bytes * (1 - number / POINTS))
        schedule = _solve_saving(contracted, problem, allowed, int(ROOM * peak))
        if schedule is None:
            schedule = _leanest(contracted, problem, found[-1].saved_bytes, int(ROOM * peak))
            return found if schedule is None else [*found, _plan(contracted, problem, schedule)]
        found.append(_plan(contracted, problem, schedule))
    return found


def _plan(contracted: FusedGraph, problem: Problem, schedule: Schedule) -> BodyPlan:
    numbers = segment_numbers(problem, schedule, (contracted.boundary,))
    replay = cut_segments(contracted, schedule, numbers)
    saved = sum(contracted.program.bytes_of(number) for number in replay.saved)
    return BodyPlan(saved, simulate(problem, schedule).time_ns, replay, schedule)


def _solve_saving(contracted: FusedGraph, problem: Problem, saved_bytes: int, room: int) -> Schedule | None:
    """The fastest schedule that saves at most so much; None where there is none."""
    from remat.within import fit_within

    workspace, sizes = list(problem.costs.workspace_bytes), problem.costs.size_bytes
    # What backward is given is there too when forward ends, and is not saved.
    given = sum(sizes[value] for value in problem.graph.ops[contracted.boundary].outputs)
    workspace[contracted.boundary] = max(0, room - saved_bytes - given)
    costs = Costs(problem.costs.time_ns, tuple(workspace), sizes)
    try:
        fitted = fit_within(replace(problem, costs=costs, budget_bytes=room), "auto", rules=CPU, time_limit_s=POINT_S)
    except InfeasibleBudget:
        return None
    return fitted.solution.schedule


def _leanest(contracted: FusedGraph, problem: Problem, known: int, room: int) -> Schedule | None:
    """What lies between a refused amount and the last that was found: at least the carry has to be saved."""
    least = sum(problem.costs.size_bytes[value] for value in problem.graph.ops[0].outputs)
    return _solve_saving(contracted, problem, least, room) if least < known else None


def _hull(points: Sequence[BodyPlan]) -> tuple[BodyPlan, ...]:
    """Only what no mixture of two others beats."""
    ordered = sorted(points, key=lambda item: (item.saved_bytes, item.time_ns))
    hull: list[BodyPlan] = []
    for point in ordered:
        if hull and (point.saved_bytes == hull[-1].saved_bytes or point.time_ns >= hull[-1].time_ns):
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return tuple(reversed(hull))


def _slope(lean: BodyPlan, rich: BodyPlan) -> float:
    """Time per byte, negative; it must rise from left to right."""
    return (rich.time_ns - lean.time_ns) / (rich.saved_bytes - lean.saved_bytes)
