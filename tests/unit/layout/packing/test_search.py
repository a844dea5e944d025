"""The exact search: what it finds, what it refutes, and that its parts do what they say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.layouts import buffers, can_be_placed, lowest_height

from remat.layout import Buffer, LayoutProblem, LayoutStatus, load, place
from remat.layout.packing.exact import BRANCHING_RULES
from remat.layout.packing.grid import make_grid, members
from remat.layout.packing.search import BranchingRule, PlacementSearch, SearchOutcome
from remat.layout.packing.sections import find_sections
from remat.layout.packing.valley import valleys
from remat.layout.synthetic import dissected, random_lives, training
from remat.layout.validate import check_offsets

PINWHEEL = buffers((0, 2, 1), (2, 3, 2), (1, 3, 1), (0, 1, 2), (1, 2, 1))
"""Five pieces of a square of 3 by 3 that no straight cut separates."""


def test_sections_are_the_largest_sets_alive_together() -> None:
    sections = find_sections(LayoutProblem(buffers((0, 5, 1), (1, 3, 1), (3, 6, 1), (8, 9, 1))))
    assert (sections.count, sections.first, sections.end) == (3, (0, 0, 1, 2), (2, 1, 2, 3))


def test_grid_counts_in_the_common_unit() -> None:
    grid = make_grid(LayoutProblem(buffers((0, 2, 12), (1, 3, 8))))
    assert (grid.unit, grid.size, grid.load) == (4, (3, 2), (5,))
    assert list(members(grid.covering[0])) == [0, 1]


def test_valleys_lie_between_higher_floors() -> None:
    assert list(valleys([3, 1, 1, 2, 0, 4])) == [(1, 3), (4, 5)]
    assert list(valleys([0, 0])) == [(0, 2)]


@pytest.mark.parametrize("rule", BRANCHING_RULES)
def test_every_taste_finds_the_pinwheel_and_refutes_less(rule: BranchingRule) -> None:
    problem = LayoutProblem(PINWHEEL)
    search = PlacementSearch(make_grid(problem), 3)
    assert search.run(rule, 1000) is SearchOutcome.FOUND
    check_offsets(problem, tuple(search.offsets[number] for number in range(5)))
    assert PlacementSearch(make_grid(problem), 2).run(rule, 1000) is SearchOutcome.REFUTED


WASTEFUL = [
    ((0, 1, 4), (1, 2, 4), (2, 3, 3), (0, 4, 2), (3, 4, 2), (2, 5, 1), (4, 5, 4), (3, 6, 1), (5, 6, 3), (5, 6, 2)),
    ((0, 1, 5), (1, 2, 4), (0, 3, 3), (2, 3, 2), (1, 4, 1), (3, 4, 5))
    + ((4, 5, 1), (4, 5, 5), (2, 6, 2), (5, 6, 3), (5, 6, 3)),
    ((0, 1, 6), (1, 2, 5), (2, 3, 2), (1, 4, 1), (3, 4, 1), (4, 5, 2))
    + ((2, 5, 3), (5, 6, 4), (5, 7, 1), (6, 7, 4), (3, 8, 1), (7, 8, 5)),
]
"""Lives and sizes that no placement as low as their load exists for."""


@pytest.mark.parametrize("rows", WASTEFUL)
def test_load_that_cannot_be_reached_is_refuted(rows: tuple[tuple[int, int, int], ...]) -> None:
    problem = LayoutProblem(buffers(*rows))
    lowest = load(problem) + 1
    assert can_be_placed(problem, lowest) and not can_be_placed(problem, lowest - 1)
    placement = place(problem, "exact", time_limit_s=10)
    assert (placement.status, placement.height, placement.bound) == (LayoutStatus.OPTIMAL, lowest, lowest)
    for rule in BRANCHING_RULES:
        assert PlacementSearch(make_grid(problem), lowest - 1).run(rule, 100_000) is SearchOutcome.REFUTED


def test_search_without_nodes_is_unknown() -> None:
    assert PlacementSearch(make_grid(dissected(40)), 1024).run(BRANCHING_RULES[0], 5) is SearchOutcome.UNKNOWN


def test_search_that_is_stopped_is_unknown() -> None:
    search = PlacementSearch(make_grid(dissected(40)), 1024, stop=lambda: True)
    assert search.run(BRANCHING_RULES[0], 1000) is SearchOutcome.UNKNOWN


@pytest.mark.parametrize("seed", range(3))
def test_dissected_rectangle_is_put_together_again(seed: int) -> None:
    problem = dissected(120, seed=seed)
    placement = place(problem, time_limit_s=20)
    assert (placement.status, placement.height) == (LayoutStatus.OPTIMAL, 1024)


def test_capacity_below_the_optimum_is_proven_infeasible() -> None:
    problem = dissected(60, seed=1)
    placement = place(replace(problem, capacity=1023), time_limit_s=5)
    assert placement.status is LayoutStatus.INFEASIBLE
    assert placement.bound == placement.height == 1024


def test_alignment_is_kept_and_counted() -> None:
    problem = LayoutProblem((Buffer("a", 0, 2, 3, 2), Buffer("b", 1, 3, 3, 2), Buffer("c", 2, 4, 5, 4)))
    placement = place(problem, "exact", time_limit_s=5)
    assert placement.status is LayoutStatus.OPTIMAL
    assert placement.height == lowest_height(problem) == 9


def test_generators_repeat_themselves() -> None:
    assert random_lives(50, seed=3) == random_lives(50, seed=3) != random_lives(50, seed=4)
    assert dissected(50, seed=3) == dissected(50, seed=3)
    assert training(4, seed=3) == training(4, seed=3)


def test_training_like_lives_are_placed_close_to_their_load() -> None:
    problem = training(24, seed=1)
    placement = place(problem, time_limit_s=5)
    assert placement.height <= 1.01 * load(problem)
