"""Local search over keep-sets."""

from __future__ import annotations

import itertools

import pytest
from tests.contract import graphs

from remat.core import Status
from remat.core.search.limits import Limits
from remat.solvers import get_solver
from remat.solvers.base import Strategy, best_of
from remat.solvers.strategies.keep_search import MOST_TRIES, KeepSetSearch

both = pytest.mark.parametrize("name", ["anneal", "genetic"])


@both
def test_search_is_never_worse_than_what_it_starts_from(name: str) -> None:
    for problem in (graphs.transformer(5), graphs.layered(2), graphs.chain(12)):
        limited = graphs.squeezed(problem, 0.7)
        search = KeepSetSearch(limited)
        starts = [search.schedule(start) for start in search.starts()]
        begun = best_of(limited, starts, name, Limits(60.0))
        found = get_solver(name).solve(limited, Limits(60.0))
        assert found.status is not Status.INFEASIBLE or begun.status is Status.INFEASIBLE
        if begun.schedule is not None:
            assert found.time_ns <= begun.time_ns


@both
def test_search_improves_on_the_strategies(name: str) -> None:
    limited = graphs.squeezed(graphs.layered(1), 0.8)
    search = KeepSetSearch(limited)
    starts = [search.schedule(start) for start in search.starts()]
    begun = best_of(limited, starts, name, Limits(60.0))
    assert get_solver(name).solve(limited, Limits(60.0)).time_ns < begun.time_ns


@both
def test_search_ends_by_its_own_count(name: str) -> None:
    solver = get_solver(name)
    assert isinstance(solver, Strategy)
    proposed = solver.schedules(graphs.squeezed(graphs.layered(1), 0.5), 0)
    assert len(list(itertools.islice(proposed, 4 * MOST_TRIES))) < 4 * MOST_TRIES


def test_weighing_a_choice_again_costs_no_try() -> None:
    search = KeepSetSearch(graphs.squeezed(graphs.chain(6), 0.7))
    before = search.left
    assert search.weigh(frozenset({1, 2})) == search.weigh(frozenset({2, 1}))
    assert search.left == before - 1
