"""Room set aside at stages: proposals are schedules of the problem, and rounds learn where they overflow."""

from __future__ import annotations

import pytest
from tests.contract.graphs import chain, squeezed

from remat.core import Problem, ValueId, plain_schedule, simulate, validate
from remat.core.copies import Link, with_copies, without_copies
from remat.core.search.limits import Limits
from remat.solvers.exact.copy_cuts import bound_with_copies
from remat.solvers.exact.copy_reserves import Reserves
from remat.solvers.schedule.to_host import stays, with_trips

pytest.importorskip("highspy")
LIMITS = Limits(30.0)


def moving(share: float) -> Problem:
    problem = squeezed(chain(30), share)
    idle = sorted(stay.value for stay in stays(problem, plain_schedule(problem.graph)))
    link = Link(0.5, 0.5)
    return with_copies(problem, [link.movable(ValueId(v), problem.costs.size_bytes[v]) for v in idle])


def reserves_of(problem: Problem) -> Reserves:
    return Reserves(problem, bound_with_copies(problem, LIMITS, lambda: False).cut)


def overflows(problem: Problem, reserves: Reserves, rounds: int) -> list[int]:
    """By how much each round's schedule is over the budget with its trips."""
    found = []
    for _ in range(rounds):
        made = reserves.propose(LIMITS, lambda: False)
        assert made is not None
        validate(without_copies(problem).with_budget(2**60), made.computing)
        steps = with_trips(problem, made.computing, made.trips)
        found.append(simulate(problem, steps).peak_bytes - problem.budget_bytes)
    return found


@pytest.mark.parametrize("share", [0.4, 0.5, 0.6])
def test_rounds_come_nearer_to_the_budget(share: float) -> None:
    problem = moving(share)
    first, *later = overflows(problem, reserves_of(problem), 12)
    assert min(later) < first or first <= 0


def test_a_stage_that_overflows_has_less_room_in_the_next_round() -> None:
    problem = moving(0.4)
    reserves = reserves_of(problem)
    overflows(problem, reserves, 1)
    before = dict(reserves.rooms)
    assert before
    overflows(problem, reserves, 1)
    assert any(reserves.rooms[stage] < room for stage, room in before.items())


def test_only_a_faster_schedule_is_the_best_so_far() -> None:
    reserves = reserves_of(moving(0.5))
    reserves.propose(LIMITS, lambda: False)
    assert reserves.learn(5.0)
    assert not reserves.learn(5.0)
    assert reserves.learn(4.0)


def test_the_same_seed_proposes_the_same() -> None:
    problem = moving(0.4)
    one, other = reserves_of(problem), reserves_of(problem)
    for _ in range(12):
        assert one.propose(LIMITS, lambda: False) == other.propose(LIMITS, lambda: False)
