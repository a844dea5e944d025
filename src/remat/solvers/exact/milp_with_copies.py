"""Schedules with copies from the cut program, with a cut at every op where that is small enough.

In: a problem with copies and a library that solves programs. Out: schedules, and a bound for all of them. What the
program holds or has away at each cut is not computed again; the rest is, just in time, and copies are chosen for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from remat.core.copies import without_copies
from remat.core.problem import Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.core.search.limits import Countdown, Limits
from remat.core.simulate import simulate
from remat.solvers.backends import Backend
from remat.solvers.exact.bounds import safe
from remat.solvers.exact.copy_cuts import AwayProgram, away_program
from remat.solvers.schedule.editable import EditableSchedule
from remat.solvers.schedule.keep import drop_all_but
from remat.solvers.schedule.to_host import fit_by_copies, trips_without_waiting
from remat.solvers.search.around_trips import around_trips

MAX_COLUMNS = 20_000
"""Larger programs have fewer cuts: those where the plain step needs most memory."""
COLUMNS_PER_OP = 4
PROGRAM_SHARE = 0.6
"""Of the time, for each program; the rest is for schedules around what it says."""


def solve_with_copies(
    problem: Problem, minimise: Backend, limits: Limits, raise_bound: Callable[[float], None]
) -> Iterator[Schedule]:
    """See the module's docstring; `raise_bound` is told a time that no schedule beats."""
    countdown = Countdown(limits)
    # A single cut is solved at once; many prove more, if there is time.
    for cuts in dict.fromkeys((_cuts(problem, 1), _cuts(problem, MAX_COLUMNS))):
        model = away_program(problem, cuts)
        if countdown.left_s() <= 0 or not model.build():
            return
        answer = minimise(model.program, limits.within(PROGRAM_SHARE * countdown.left_s()), {})
        # Waiting is counted up to the plain step's time, so that nothing fits in less than twice that at the worst.
        raise_bound(problem.base_time_ns + min(max(safe(answer.bound / model.scale), 0.0), model.base))
        if answer.point is not None:
            yield from _schedules(problem, model, answer.point, lambda: countdown.left_s() <= 0)


def _cuts(problem: Problem, columns: int) -> tuple[int, ...]:
    plain = without_copies(problem)
    count = len(plain.graph.ops)
    loads = simulate(plain, plain_schedule(plain.graph)).live_bytes
    most = max(1, columns // (COLUMNS_PER_OP * max(1, count)))
    return tuple(sorted(sorted(range(count), key=lambda number: -loads[number])[:most]))


def _schedules(
    problem: Problem, model: AwayProgram, point: tuple[float, ...], stop: Callable[[], bool]
) -> Iterator[Schedule]:
    editable = EditableSchedule(without_copies(problem))
    away = [frozenset(v for v, column in away.items() if point[column] > 0.5) for away in model.away]
    kept = [model.kept(index, point) | gone for index, gone in enumerate(away)]
    drop_all_but(editable, kept, model.cuts)
    computing = editable.schedule()
    steps = fit_by_copies(problem, computing)
    if steps is not None:
        yield steps
    for values in (frozenset[int]().union(*away), None):
        made = around_trips(problem, computing, trips_without_waiting(problem, computing, values), stop)
        if made is not None:
            yield made.steps
