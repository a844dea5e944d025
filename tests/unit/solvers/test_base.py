from __future__ import annotations

import itertools

from tests.contract import graphs

from remat.core import Status, plain_schedule
from remat.core.search.limits import Limits
from remat.solvers import Progress
from remat.solvers.base import best_of
from remat.solvers.schedule.keep import keep_schedule

PROBLEM = graphs.transformer(3)
PLAIN, FRUGAL = plain_schedule(PROBLEM.graph), keep_schedule(PROBLEM, frozenset())


def test_fastest_schedule_that_fits_wins() -> None:
    assert best_of(PROBLEM, [FRUGAL, PLAIN], "x", Limits(9.0)).schedule == PLAIN
    limited = graphs.squeezed(PROBLEM, 0.99)
    assert best_of(limited, [PLAIN, FRUGAL], "x", Limits(9.0)).schedule == FRUGAL


def test_smallest_peak_is_named_where_nothing_fits() -> None:
    solution = best_of(PROBLEM.with_budget(1), [PLAIN, FRUGAL], "x", Limits(9.0))
    assert solution.status is Status.INFEASIBLE
    assert solution.min_budget_bytes < graphs.peak(PROBLEM)


def test_nothing_is_asked_for_after_the_time_limit() -> None:
    proposed = iter([FRUGAL, FRUGAL, PLAIN])
    clock = itertools.count(0.0, 1.0).__next__
    solution = best_of(PROBLEM, proposed, "x", Limits(1.0, clock=clock))
    assert solution.reason == "Out of time."
    assert list(proposed) == [FRUGAL, PLAIN]


def test_nothing_is_asked_for_once_the_plain_schedule_fits() -> None:
    proposed = iter([PLAIN, FRUGAL])
    assert best_of(PROBLEM, proposed, "x", Limits(9.0)).status is Status.OPTIMAL
    assert list(proposed) == [FRUGAL]


def test_progress_is_told_of_each_better_schedule() -> None:
    seen: list[Progress] = []
    best_of(PROBLEM, [FRUGAL, FRUGAL, PLAIN], "x", Limits(9.0), progress=seen.append)
    assert [report.time_ns for report in seen] == sorted((report.time_ns for report in seen), reverse=True)
    assert len(seen) == 2
