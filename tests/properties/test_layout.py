"""Properties of layout solvers on small random problems: exact answers are those of trying every order."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from tests.support.layouts import can_be_placed, full_problems, lowest_height, small_problems

from remat.layout import REGISTRY, LayoutProblem, LayoutStatus, lower_bound, place

QUICK = [solver for solver in REGISTRY if solver.name not in ("cp_sat", "local_search")]


@settings(max_examples=250, deadline=None)
@given(problem=small_problems())
def test_exact_height_is_the_lowest_there_is(problem: LayoutProblem) -> None:
    placement = place(problem, "exact", time_limit_s=20)
    assert placement.height == placement.bound == lowest_height(problem)
    assert placement.status is LayoutStatus.OPTIMAL


@settings(max_examples=250, deadline=None)
@given(problem=full_problems())
def test_exact_search_wastes_only_what_must_be_wasted(problem: LayoutProblem) -> None:
    placement = place(problem, "exact", time_limit_s=20)
    assert placement.height == placement.bound
    assert not can_be_placed(problem, placement.height - 1)


@settings(max_examples=100, deadline=None)
@given(problem=small_problems(alignments=(1, 2, 3, 4, 6), most=5))
def test_exact_height_is_the_lowest_with_alignments_too(problem: LayoutProblem) -> None:
    placement = place(problem, "exact", time_limit_s=20)
    assert placement.height == placement.bound == lowest_height(problem)


@settings(max_examples=100, deadline=None)
@given(problem=small_problems(alignments=(1, 1, 2)))
def test_capacity_one_below_the_lowest_is_proven_infeasible(problem: LayoutProblem) -> None:
    lowest = lowest_height(problem)
    if lowest:
        placement = place(replace(problem, capacity=lowest - 1), "exact", time_limit_s=20)
        assert placement.status is LayoutStatus.INFEASIBLE


@settings(max_examples=60, deadline=None)
@given(problem=small_problems(alignments=(1, 2)))
def test_bounds_hold_for_every_solver(problem: LayoutProblem) -> None:
    lowest = lowest_height(problem)
    assert lower_bound(problem) <= lowest
    for solver in QUICK:
        placement = place(problem, solver, time_limit_s=5)
        assert placement.bound <= lowest <= placement.height
