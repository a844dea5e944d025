"""Laws of the portfolio on random graphs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract import graphs

from remat.core import Status, validate
from remat.core.search.limits import Limits
from remat.solvers import get_solver, min_budget


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), share=st.floats(0.3, 1.0))
def test_auto_fits_or_names_a_budget_that_does(seed: int, share: float) -> None:
    problem = graphs.squeezed(graphs.layered(seed, layers=4), share)
    solution = get_solver("auto").solve(problem, Limits(1.0))
    if solution.schedule is not None:
        assert validate(problem, solution.schedule) <= problem.budget_bytes
        return
    assert solution.status is Status.INFEASIBLE
    enough = problem.with_budget(solution.min_budget_bytes)
    assert get_solver("auto").solve(enough, Limits(1.0)).schedule is not None


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000))
def test_smallest_budget_is_between_floor_and_plain_peak(seed: int) -> None:
    problem = graphs.layered(seed, layers=3)
    assert min_budget(problem) <= graphs.peak(problem)
