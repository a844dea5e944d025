from __future__ import annotations

import pytest

from remat.core import validate
from remat.core.problem import Problem
from remat.core.schedule import plain_schedule
from remat.core.search.limits import Limits
from remat.core.simulate import simulate
from remat.solvers.exact.long_graphs import try_prices
from remat.solvers.search.incumbent import ScheduleIncumbent
from remat.zoo import synthetic

pytest.importorskip("scipy")


def within(problem: Problem, share: float) -> Problem:
    return problem.with_budget(int(share * simulate(problem, plain_schedule(problem.graph)).peak_bytes))


@pytest.mark.parametrize(("problem", "share", "gap"), [
    (synthetic.recurrence(200), 0.5, 0.01),
    (synthetic.recurrence(250), 0.15, 0.02),
    (synthetic.chain(400), 0.5, 0.01),
    (synthetic.transformer(24), 0.5, 0.05),
])  # fmt: skip
def test_long_graphs_fit_near_their_bound(problem: Problem, share: float, gap: float) -> None:
    problem = within(problem, share)
    incumbent = ScheduleIncumbent(problem, Limits(600.0))
    try_prices(incumbent)
    assert incumbent.best is not None
    assert validate(problem, incumbent.best) <= problem.budget_bytes
    assert 0 < incumbent.bound <= incumbent.value
    assert incumbent.value - incumbent.bound <= gap * (incumbent.base_time + incumbent.value)


def test_what_cannot_fit_is_left_alone() -> None:
    incumbent = ScheduleIncumbent(synthetic.recurrence(40).with_budget(1), Limits(600.0))
    try_prices(incumbent)
    assert incumbent.best is None and incumbent.bound == 0
