"""More cuts for the program with copies, where the schedule built from its solution is over the budget.

In: a problem with copies and the answer of the best single cut. Out, round by round: a bound, and what to compute again
and what to have away for it. Each round adds one cut: programs of many take longer than they have. Rounds go on until
their time is over or nothing is left to add.
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

ROUND_SHARE = 0.7
"""Of the time that is left, for each round."""
PROGRAM_GAP = 1e-3
"""Of the extra time: what is lost by it is little beside what more cuts gain."""
COLUMNS_PER_OP = 4
SCREENED_CUTS, SCREEN_SHARE = 6, 0.15
"""Ops of either kind whose relaxation is solved to find the next cut, and what share of the time that is left they may
take.
"""


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
    countdown = Countdown(limits)
    cuts: tuple[int, ...] = (start.cut,)
    _, keys = _build(problem, cuts, [start.kept | start.away], start.away)
    while countdown.left_s() > 0 and not stop():
        grown = _grown(problem, cuts, keys, limits.within(SCREEN_SHARE * countdown.left_s()), stop)
        # What has grown no further needs more time, not more cuts; a single one was solved before.
        is_same, cuts = grown == cuts, grown
        model = _built(problem, cuts)
        if model is None or len(cuts) == 1:
            return
        share = 1.0 if is_same else ROUND_SHARE
        within = replace(limits.within(share * countdown.left_s()), gap=PROGRAM_GAP)
        answer = minimise(model.program, within, relaxed=False, stop=stop)
        extra = _extra(model, answer)
        if answer.point is None:
            yield Refined(extra, None)
            return
        kept, away = _held(model, answer.point)
        computing, keys = _build(problem, cuts, kept, away)
        yield Refined(extra, computing, away)
        if is_same and answer.complete:
            return


def _grown(
    problem: Problem, cuts: tuple[int, ...], keys: list[int], limits: Limits, stop: Callable[[], bool]
) -> tuple[int, ...]:
    """One more cut: that of which the relaxation is highest, of a few."""
    countdown, best, highest = Countdown(limits), cuts, -1.0
    for stage in _candidates(without_copies(problem), cuts, keys):
        tried = tuple(sorted((*cuts, stage)))
        model = _built(problem, tried)
        if model is None or (countdown.left_s() <= 0 and highest >= 0) or stop():
            break
        extra = _extra(model, minimise(model.program, limits, relaxed=True, stop=stop))
        if extra > highest:
            best, highest = tried, extra
    return best


def _candidates(plain: Problem, cuts: tuple[int, ...], keys: list[int]) -> list[int]:
    """Where the schedule overflows, and ops after the first cut that need most by themselves, the earliest first."""
    count = len(plain.graph.ops)
    over = dict.fromkeys(min(key // count, count - 1) for key in keys)
    largest = sorted(range(cuts[0] + 1, count), key=lambda number: (-op_need_bytes(plain, number), number))
    fresh = [[stage for stage in stages if stage not in cuts][:SCREENED_CUTS] for stages in (over, largest)]
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
