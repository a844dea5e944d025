"""Laws of answers with copies: whatever the time, never slower than the same solver without them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract import graphs

from remat.core import Problem, Schedule, ValueId, plain_schedule, validate
from remat.core.copies import Link, with_copies, without_copies
from remat.core.search.limits import Countdown, Limits
from remat.core.solution import Solution
from remat.solvers.auto import Auto
from remat.solvers.base import Progress, judge
from remat.solvers.offloading import Offloading
from remat.solvers.schedule.editable import EditableSchedule
from remat.solvers.schedule.evict import EvictionRule, evict

SEEDS, SHARES = st.integers(0, 10_000), st.floats(0.3, 0.95)


class Ticking:
    """A clock that moves by one second whenever it is looked at: the same search sees the same times."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        self._now += 1.0
        return self._now


def moving(seed: int, share: float) -> Problem:
    """A random step within that share of its plain peak, and a link that is slow or fast."""
    problem = graphs.squeezed(graphs.layered(seed, layers=14), share)
    rng = random.Random(seed)
    link = Link(*(rng.choice((0.02, 0.2, 1.0, 5.0)) for _ in range(2)))
    inside = [v for v in range(problem.graph.value_count) if v not in problem.graph.outputs]
    return with_copies(problem, [link.movable(ValueId(v), problem.costs.size_bytes[v]) for v in inside])


def is_never_slower(solver: Offloading, problem: Problem, limit: float) -> bool:
    plain = without_copies(problem)
    alone = solver.inner.solve(plain, Limits(limit, clock=Ticking()))
    found = solver.solve(problem, Limits(limit, clock=Ticking()))
    if found.schedule is not None:
        validate(problem, found.schedule)
    return alone.schedule is None or (found.schedule is not None and found.time_ns <= alone.time_ns)


@settings(max_examples=6)
@given(SEEDS, SHARES, st.integers(1, 400))
def test_the_portfolio_with_copies_is_never_slower_than_without(seed: int, share: float, limit: int) -> None:
    assert is_never_slower(Offloading(Auto()), moving(seed, share), limit)


@dataclass(frozen=True, slots=True)
class Late:
    """A solver that takes all of its time, and has nothing good before it had a certain time."""

    enough_s: float
    name: str = "late"

    def solve(self, problem: Problem, limits: Limits, progress: Callable[[Progress], None] | None = None) -> Solution:
        countdown = Countdown(limits)
        while countdown.left_s() > 0:
            pass
        if limits.time_limit_s < self.enough_s:
            return judge(problem, plain_schedule(problem.graph), self.name)
        return judge(problem, _dropped(problem), self.name)


def _dropped(problem: Problem) -> Schedule:
    editable = EditableSchedule(problem)
    evict(editable, problem.budget_bytes, EvictionRule(), stop=lambda: False, max_steps=10_000)
    return editable.schedule()


@settings(max_examples=12)
@given(SEEDS, SHARES, st.integers(1, 60), st.integers(1, 60))
def test_a_solver_that_needs_all_of_its_time_has_it(seed: int, share: float, limit: int, enough: int) -> None:
    assert is_never_slower(Offloading(Late(enough)), moving(seed, share), limit)
