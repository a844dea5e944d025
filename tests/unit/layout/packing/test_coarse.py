"""The large buffers first: what counts as small, and placements in which the small ones find their gaps."""

from __future__ import annotations

import random

import pytest

from remat.core.search.limits import Limits
from remat.layout import Buffer, LayoutProblem, load
from remat.layout.base import LayoutIncumbent
from remat.layout.packing.coarse import large_buffers, place_large_first, with_small
from remat.layout.packing.greedy import fill
from remat.layout.packing.orders import Order, arrange
from remat.layout.synthetic import training
from remat.layout.validate import check_offsets


def mixed(seed: int) -> LayoutProblem:
    """A training step with three small buffers for each large one."""
    draw = random.Random(seed)
    large = training(6, seed=seed).buffers
    end = max(buffer.upper for buffer in large)
    small = []
    for number in range(3 * len(large)):
        lower = draw.randrange(end - 1)
        small.append(Buffer(f"small{number}", lower, draw.randint(lower + 1, end), draw.randint(1, 512)))
    return LayoutProblem((*large, *small))


@pytest.mark.parametrize("seed", range(3))
def test_small_buffers_never_take_more_than_their_share(seed: int) -> None:
    problem = mixed(seed)
    large = set(large_buffers(problem, 0.05))
    small = [buffer for number, buffer in enumerate(problem.buffers) if number not in large]
    assert load(LayoutProblem(tuple(small))) <= 0.05 * load(problem)
    smallest = min(problem.buffers[number].size for number in large)
    assert all(buffer.size <= smallest for buffer in small)
    assert len(small) >= 3 * len(training(6, seed=seed).buffers)


def test_without_a_share_nothing_is_small() -> None:
    problem = mixed(0)
    assert large_buffers(problem, 0.0) == list(range(len(problem.buffers)))


@pytest.mark.parametrize("seed", range(3))
def test_small_buffers_are_added_without_moving_the_large_ones(seed: int) -> None:
    problem = mixed(seed)
    large = large_buffers(problem, 0.05)
    part = LayoutProblem(tuple(problem.buffers[number] for number in large))
    offsets = fill(part, arrange(part, Order.SIZE))
    assert offsets is not None
    found = with_small(problem, large, offsets)
    check_offsets(problem, tuple(found))
    assert [found[number] for number in large] == offsets


def test_the_search_sees_the_large_buffers_alone() -> None:
    problem, seen = mixed(1), []
    incumbent = LayoutIncumbent(problem, "test", Limits(60, gap=0.0))

    def search(own: LayoutIncumbent) -> None:
        seen.append(len(own.problem.buffers))
        own.offer(fill(own.problem, arrange(own.problem, Order.SIZE)) or [], "size")

    before = incumbent.value
    place_large_first(incumbent, search, time_limit_s=1.0)
    assert seen == sorted(set(seen))
    assert max(seen) < len(problem.buffers)
    assert incumbent.value < before
    check_offsets(problem, tuple(incumbent.best))


def test_a_problem_without_small_buffers_is_left_alone() -> None:
    problem = LayoutProblem(tuple(Buffer(str(number), 0, 1, 10) for number in range(20)))
    incumbent = LayoutIncumbent(problem, "test", Limits(60, gap=0.0))
    incumbent.bound = 0
    place_large_first(incumbent, lambda *_: pytest.fail("nothing is small"), time_limit_s=1.0)
