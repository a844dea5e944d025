"""What local search is made of: orders, gaps, and the cheapest place for a buffer that finds none."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.layouts import buffers

from remat.layout import LayoutAuto, LayoutProblem, LayoutStatus, load, place
from remat.layout.packing.field import Field, put_all
from remat.layout.packing.orders import Order, arrange
from remat.layout.packing.shelf import Shelf
from remat.layout.synthetic import random_lives

FIVE = LayoutProblem(buffers((0, 9, 2), (1, 3, 5), (2, 4, 3), (5, 6, 8), (7, 8, 1)))


@pytest.mark.parametrize(
    ("order", "numbers"),
    [
        (Order.SIZE, [3, 1, 2, 0, 4]),
        (Order.LIFE, [0, 1, 2, 3, 4]),
        (Order.AREA, [0, 1, 3, 2, 4]),
        (Order.START, [0, 1, 2, 3, 4]),
        (Order.LOAD, [3, 1, 2, 0, 4]),
    ],
)
def test_orders_put_the_hardest_first(order: Order, numbers: list[int]) -> None:
    # The fullest time is 5 or 2, with 10 alive: all but the last buffer see it.
    assert arrange(FIVE, order) == numbers


def test_fullest_time_is_found_for_every_life() -> None:
    problem = random_lives(200, horizon=150, longest=90)
    order = arrange(problem, Order.LOAD)
    alive = [sum(b.size for b in problem.buffers if b.lower <= time < b.upper) for time in range(152)]
    fullest = [max(alive[problem.buffers[number].lower : problem.buffers[number].upper]) for number in order]
    assert fullest == sorted(fullest, reverse=True)


def test_shelf_takes_the_lowest_or_the_tightest_gap() -> None:
    low, high, top, new = buffers((0, 9, 4), (0, 9, 2), (0, 9, 1), (0, 9, 2))
    shelf = Shelf(4)
    for buffer, offset in ((low, 3), (high, 9), (top, 12)):
        shelf.put(buffer, offset)
    # Gaps: 0 to 3, 7 to 9, 11 to 12, and above 13.
    assert (shelf.lowest_gap(new), shelf.tightest_gap(new)) == (0, 7)


def test_field_finds_the_lowest_gap_below_a_height() -> None:
    field = Field(LayoutProblem(buffers((0, 4, 2), (2, 6, 3), (3, 5, 2))))
    put_all(field, [0, 4, -1])
    assert field.lowest_gap(2, 10) == 2
    field.put(0, 1)
    assert field.lowest_gap(2, 10) == 7
    assert field.lowest_gap(2, 8) is None
    assert field.above(6) == [1]


def test_cheapest_place_displaces_the_least() -> None:
    field = Field(LayoutProblem(buffers((0, 4, 3), (0, 4, 3), (4, 6, 9), (0, 4, 3))))
    put_all(field, [0, 3, 0, -1])
    assert field.cheapest_place(3, 6, np.array([5.0, 1.0, 0.0, 0.0])) == (3, [1])
    assert field.cheapest_place(3, 6, np.array([1.0, 5.0, 0.0, 0.0])) == (0, [0])


def test_local_search_gains_on_greedy_orders() -> None:
    problem = random_lives(400, horizon=1000, longest=200, seed=1)
    greedy = min(place(problem, name, time_limit_s=5).height for name in ("size", "area"))
    assert place(problem, "local_search", time_limit_s=2).height < greedy


def test_gap_ends_the_search_early() -> None:
    problem = random_lives(400, horizon=1000, longest=200, seed=1)
    placement = place(problem, LayoutAuto(gap=0.5), time_limit_s=60)
    assert placement.status is LayoutStatus.FEASIBLE or placement.height == load(problem)
    assert placement.gap <= 0.5
