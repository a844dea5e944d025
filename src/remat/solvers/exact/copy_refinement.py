"""More cuts for the program with copies, where the schedule built from its solution is over the budget.

In: a problem with copies and the answer of the best single cut. Out, round by round: a bound, and what to compute again
and what to have away for it. Each round adds one cut, and a cut that has not raised the bound is taken away again:
programs of many take longer than they have, and say less than smaller ones that were solved to their end. Rounds go on
until their time is over, nothing is left to add, or a few cuts in a row have raised nothing: schedules need the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from remat.core.copies import without_copies
from remat.core.problem import Problem, op_need_bytes
from remat.core.schedule import Schedule
from remat.core.search.limits import Countdown, Limits
from remat.solvers.backends.linear_highs import ProgramAnswer, minimise
from remat.solvers.exact.bounds import MAX_COLUMNS, find_overflows, safe
from remat.solvers.exact.copy_cuts import AwayAnswer, AwayProgram, away_program
from remat.solvers.schedule.editable import EditableSchedule
from remat.solvers.schedule.keep import drop_all_but
from remat.solvers.schedule.to_host import trips_without_waiting
from remat.solvers.search.around_trips import step_keys

PROGRAM_GAP = 1e-3
"""Of the extra time: what is lost by it is little beside what more cuts gain."""
COLUMNS_PER_OP = 4
SCREENED_CUTS, SCREEN_SHARE = 6, 0.15
"""Ops of either kind whose relaxation is solved to find the next cut, and what share of the time that is left they may
take.
"""
IDLE_ROUNDS = 3
"""Cuts in a row that have not raised the bound, after which no more is tried."""
GAIN = 1e-4
"""Of the plain time: what raises the bound by less has not."""


@dataclass(frozen=True, slots=True)
class Refined:
    """What one program says."""

    extra_time: float
    """What every schedule with copies within the budget takes beyond the plain time, at least."""
    computing: Schedule | None
    """With what runs again and without copies; None where no point was found."""
    away: frozenset[int] = frozenset()


def refine(problem: Problem, start: AwayAnswer, limits: Limits, stop: Callable[[], bool]) -> Iterator[Refined]:
    """See the module's docstring; `start` is the answer of a single cut."""
    countdown, least = Countdown(limits), GAIN * problem.base_time_ns
    cuts: tuple[int, ...] = (start.cut,)
    highest, tried, idle = start.extra_time, {start.cut}, 0
    _, keys = _build(problem, cuts, [start.kept | start.away], start.away)
    while idle < IDLE_ROUNDS and countdown.left_s() > 0 and not stop():
        stages = _candidates(without_copies(problem), tried, keys)
        grown = _grown(problem, cuts, stages, limits.within(SCREEN_SHARE * countdown.left_s()), stop)
        model = _built(problem, grown)
        if model is None or grown == cuts:
            return
        within = replace(limits.within(countdown.left_s()), gap=PROGRAM_GAP)
        found, overflows = _solved(problem, grown, model, minimise(model.program, within, relaxed=False, stop=stop))
        yield found
        tried.update(grown)
        idle += 1
        if found.extra_time > highest + least:
            cuts, highest, keys, idle = grown, found.extra_time, overflows, 0


def _solved(
    problem: Problem, cuts: tuple[int, ...], model: AwayProgram, answer: ProgramAnswer
) -> tuple[Refined, list[int]]:
    """What a program says, and where the schedule built from it is over the budget."""
    extra = _extra(model, answer)
    if answer.point is None:
        return Refined(extra, None), []
    kept, away = _held(model, answer.point)
    computing, overflows = _build(problem, cuts, kept, away)
    return Refined(extra, computing, away), overflows


def _grown(
    problem: Problem, cuts: tuple[int, ...], stages: list[int], limits: Limits, stop: Callable[[], bool]
) -> tuple[int, ...]:
    """One more cut: that of these of which the relaxation is highest."""
    countdown, best, highest = Countdown(limits), cuts, -1.0
    for stage in stages:
        tried = tuple(sorted((*cuts, stage)))
        model = _built(problem, tried)
        if model is None or (countdown.left_s() <= 0 and highest >= 0) or stop():
            break
        extra = _extra(model, minimise(model.program, limits, relaxed=True, stop=stop))
        if extra > highest:
            best, highest = tried, extra
    return best


def _candidates(plain: Problem, tried: set[int], keys: list[int]) -> list[int]:
    """Where the schedule overflows, and ops after the first cut that need most by themselves; none that was tried."""
    count = len(plain.graph.ops)
    over = dict.fromkeys(min(key // count, count - 1) for key in keys)
    largest = sorted(range(min(tried) + 1, count), key=lambda number: (-op_need_bytes(plain, number), number))
    fresh = [[stage for stage in stages if stage not in tried][:SCREENED_CUTS] for stages in (over, largest)]
    return list(dict.fromkeys(stage for stages in fresh for stage in stages))


def _built(problem: Problem, cuts: tuple[int, ...]) -> AwayProgram | None:
    """The program; None where it is too large, or has no answer."""
    if COLUMNS_PER_OP * len(cuts) * len(without_copies(problem).graph.ops) > MAX_COLUMNS:
        return None
    model = away_program(problem, cuts)
    return model if model.build() else None


def _extra(model: AwayProgram, answer: ProgramAnswer) -> float:
    return min(max(safe(answer.bound / model.scale), 0.0), model.base)


def _held(model: AwayProgram, point: tuple[float, ...]) -> tuple[list[frozenset[int]], frozenset[int]]:
    """What is not computed again after each cut, and what is away at any."""
    away = [frozenset(v for v, column in columns.items() if point[column] > 0.5) for columns in model.away]
    return [model.kept(index, point) | gone for index, gone in enumerate(away)], frozenset[int]().union(*away)


def _build(
    problem: Problem, cuts: tuple[int, ...], kept: list[frozenset[int]], away: frozenset[int]
) -> tuple[Schedule, list[int]]:
    """The schedule without copies, and where it is over the budget with those that nobody waits for."""
    plain = without_copies(problem)
    editable = EditableSchedule(plain)
    drop_all_but(editable, kept, cuts)
    computing = editable.schedule()
    keys = step_keys(computing, len(plain.graph.ops))
    for trip in trips_without_waiting(problem, computing, away) if keys is not None else ():
        assert keys is not None
        editable.send_away(trip.stay.value, keys[trip.gone], keys[trip.back])
    return computing, find_overflows(editable, problem.budget_bytes)
