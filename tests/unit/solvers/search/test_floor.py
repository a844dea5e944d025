"""The smallest peak that is known, also where time runs out on the way to it."""

from __future__ import annotations

import itertools

from tests.contract import graphs

from remat.core.problem import Problem
from remat.core.schedule import plain_schedule
from remat.core.search.deadline import within
from remat.core.simulate import simulate
from remat.core.validate import validate
from remat.solvers.search.floor import lowest_schedule


def peak(problem: Problem) -> int:
    return simulate(problem, lowest_schedule(problem)).peak_bytes


def test_out_of_time_the_lowest_schedule_that_was_finished_counts() -> None:
    problem = graphs.chain(24)
    plain = simulate(problem, plain_schedule(problem.graph)).peak_bytes
    looks = itertools.count()
    with within(0, lambda: 0.0):
        # A clock that stands still never runs out.
        lowest = peak(problem)
    found = []
    for allowed in (0, 200, 2_000, 20_000):
        with within(allowed, lambda: float(next(looks))):
            schedule = lowest_schedule(problem)
        validate(problem.with_budget(plain), schedule)
        found.append(simulate(problem, schedule).peak_bytes)
    assert found[0] == plain and found[-1] < plain
    assert all(lowest <= value <= plain for value in found)
