"""The smallest peak that is known, also where time runs out on the way to it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from tests.contract import graphs

from remat.core.problem import Problem
from remat.core.schedule import plain_schedule
from remat.core.search.deadline import within
from remat.core.simulate import simulate
from remat.core.validate import validate
from remat.solvers.search import floor
from remat.solvers.search.floor import lowest_schedule


def peak(problem: Problem) -> int:
    return simulate(problem, lowest_schedule(problem)).peak_bytes


def test_out_of_time_the_lowest_schedule_that_was_finished_counts() -> None:
    problem = graphs.chain(24)
    plain = simulate(problem, plain_schedule(problem.graph)).peak_bytes
    looks = itertools.count()
    found = []
    for allowed in (0, 200, 2_000, 20_000):
        with within(allowed, lambda: float(next(looks))):
            schedule = lowest_schedule(problem)
        validate(problem.with_budget(plain), schedule)
        found.append(simulate(problem, schedule).peak_bytes)
    with within(0, lambda: 0.0):
        # A clock that stands still never runs out.
        lowest = peak(problem)
    assert found[0] == plain and found[-1] < plain
    assert all(lowest <= value <= plain for value in found)


def test_lowest_schedule_of_a_graph_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = graphs.layered(3)
    first = lowest_schedule(problem)
    monkeypatch.setattr(floor, "squeeze", lambda *_: pytest.fail("looked for again"))
    assert lowest_schedule(problem.with_budget(problem.budget_bytes // 2)) == first
    offset = replace(problem, resident_bytes=problem.resident_bytes + 1000)
    assert lowest_schedule(offset) == first


def test_what_time_did_not_suffice_for_is_not_remembered() -> None:
    problem = graphs.layered(4)
    with within(5, itertools.count().__next__):
        ended = peak(problem)
    assert peak(problem) < ended
