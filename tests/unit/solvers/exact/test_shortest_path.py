from __future__ import annotations

import pytest
from tests.contract import graphs
from tests.contract.brute_force import best_time

from remat.core import validate
from remat.solvers.exact.shortest_path import shortest_schedule
from remat.solvers.schedule.editable import EditableSchedule, extra_keys

INFINITY = float("inf")


@pytest.mark.parametrize("seed", range(60))
def test_equals_brute_force(seed: int) -> None:
    problem = graphs.squeezed(graphs.tiny(seed), 0.8 if seed % 2 else 0.9)
    found, optimum = shortest_schedule(problem, INFINITY), best_time(problem)
    assert found.complete
    assert (found.schedule is None) == (optimum is None)
    if found.schedule is not None:
        assert validate(problem, found.schedule) <= problem.budget_bytes
        assert sum(problem.costs.time_ns[op] for op in found.schedule.steps) == pytest.approx(optimum)


def test_proves_that_nothing_beats_the_limit() -> None:
    problem = graphs.squeezed(graphs.tiny(1), 1.0)
    found = shortest_schedule(problem, 0.0)
    assert found.complete and found.schedule is None


def test_gives_up_on_large_problems() -> None:
    found = shortest_schedule(graphs.squeezed(graphs.layered(0), 0.6), INFINITY, max_moves=100)
    assert not found.complete and found.schedule is None
    assert not shortest_schedule(graphs.squeezed(graphs.transformer(24), 0.5), INFINITY).complete


def test_finds_the_schedules_that_cannot_be_edited() -> None:
    """Some graphs fit only if an op runs twice, or out of order, before one first run."""
    untaped = []
    for seed in range(1200, 1320):
        problem = graphs.squeezed(graphs.tiny(seed, 8 if seed % 3 == 0 else 7), 0.8)
        found = shortest_schedule(problem, INFINITY).schedule
        if found is not None and extra_keys(found, len(problem.graph.ops)) is None:
            untaped.append(seed)
    assert untaped


def test_keys_of_a_schedule_rebuild_it() -> None:
    problem = graphs.squeezed(graphs.chain(6), 0.7)
    editable = EditableSchedule(problem)
    for key in (8 * editable.flat.count + 2, 9 * editable.flat.count + 1):
        editable.insert(key)
    assert extra_keys(editable.schedule(), editable.flat.count) == editable.extra_steps()
