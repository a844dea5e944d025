from __future__ import annotations

import itertools

import pytest
from tests.contract import graphs

from remat.core import Status
from remat.core.search.limits import Limits
from remat.errors import InfeasibleBudget, MissingExtra
from remat.solvers import Progress, solve
from remat.solvers.auto import Auto
from remat.solvers.backends import linear_highs as highs


def test_transformer_at_half_the_memory_costs_little() -> None:
    problem = graphs.squeezed(graphs.transformer(24), 0.5)
    solution = solve(problem, time_limit_s=60.0)
    assert solution.time_ns < 1.15 * problem.base_time_ns
    assert solution.gap < 0.01


def test_long_chain_fits_a_quarter_of_its_peak() -> None:
    problem = graphs.squeezed(graphs.chain(60), 0.25)
    assert solve(problem, time_limit_s=3.0).peak_bytes <= problem.budget_bytes


def test_reports_progress_that_only_gets_better() -> None:
    seen: list[Progress] = []
    solve(graphs.squeezed(graphs.transformer(6), 0.5), progress=seen.append)
    assert seen
    for before, after in itertools.pairwise(seen):
        assert after.time_ns <= before.time_ns
        assert after.bound_ns >= before.bound_ns
        assert after.elapsed_s >= before.elapsed_s


def test_works_without_highs(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise MissingExtra("install `remat[solvers]`")

    monkeypatch.setattr(highs, "_highspy", missing)
    problem = graphs.squeezed(graphs.transformer(6), 0.5)
    solution = Auto().solve(problem, Limits(5.0))
    assert solution.status is Status.FEASIBLE
    assert solution.bound_ns == problem.base_time_ns


def test_returns_a_schedule_even_when_the_time_is_up() -> None:
    clock = itertools.count(0.0, 100.0).__next__
    problem = graphs.squeezed(graphs.transformer(6), 0.5)
    assert Auto().solve(problem, Limits(1.0, clock=clock)).schedule is not None


def test_smaller_gap_never_gives_a_slower_schedule() -> None:
    problem = graphs.squeezed(graphs.layered(5), 0.7)
    assert solve(problem, gap=0.0, time_limit_s=60.0).time_ns <= solve(problem, gap=0.5, time_limit_s=60.0).time_ns


def test_message_names_budget_floor_and_op() -> None:
    problem = graphs.transformer(2).with_budget(100)
    with pytest.raises(InfeasibleBudget, match=r"^Budget 100 B is below the floor of \d+ B \(op `.+`\); raise"):
        solve(problem)


def test_message_for_one_strategy_points_to_auto() -> None:
    problem = graphs.squeezed(graphs.transformer(2), 0.9)
    with pytest.raises(InfeasibleBudget, match="`none` needs; raise the budget or use `auto`"):
        solve(problem, "none")


def test_message_tells_close_numbers_apart() -> None:
    build = graphs.Builder()
    build.add("big", [], [2**30], 1)
    with pytest.raises(InfeasibleBudget, match="1073741823 bytes .* 1073741824 bytes"):
        solve(build.problem([0]).with_budget(2**30 - 1))


def test_interrupt_returns_the_best_schedule_so_far() -> None:
    def interrupt(progress: Progress) -> None:
        if progress.time_ns < float("inf"):
            raise KeyboardInterrupt

    solution = solve(graphs.squeezed(graphs.transformer(6), 0.5), progress=interrupt)
    assert solution.schedule is not None
    assert solution.reason == "Interrupted."


def test_interrupt_before_the_first_schedule_is_an_interrupt() -> None:
    def interrupt() -> float:
        if next(calls) > 2:
            raise KeyboardInterrupt
        return 0.0

    calls = itertools.count()
    with pytest.raises(KeyboardInterrupt):
        Auto().solve(graphs.squeezed(graphs.layered(3), 0.6), Limits(5.0, clock=interrupt))


def test_says_why_it_stopped() -> None:
    problem = graphs.squeezed(graphs.transformer(6), 0.5)
    assert Auto().solve(problem, Limits(20.0)).reason == "Within the gap that was asked for."
    clock = itertools.count(0.0, 100.0).__next__
    assert Auto().solve(problem, Limits(1.0, clock=clock)).reason == "The time limit was reached."
