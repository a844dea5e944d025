"""The second opinion finds every kind of wrong placement, and agrees with comparing all pairs."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from tests.support.layouts import buffers

from remat.errors import InvalidLayout
from remat.layout import Buffer, LayoutProblem, LayoutStatus, Placement, validate
from remat.layout.validate import check_offsets


def placed(offsets: tuple[int, ...], height: int, bound: int = 0) -> Placement:
    return Placement(offsets, height, bound, LayoutStatus.FEASIBLE, "test")


def test_clear_placement_passes() -> None:
    validate(LayoutProblem(buffers((0, 2, 4), (1, 3, 4), (2, 4, 4))), placed((0, 4, 0), 8))


@pytest.mark.parametrize(
    ("offsets", "height", "message"),
    [
        ((0, 3), 7, "overlap"),
        ((0, -4), 4, "multiple"),
        ((0,), 4, "2 buffers have 1 offsets"),
        ((0, 4), 9, "height is 8"),
    ],
)
def test_wrong_placement_is_refused(offsets: tuple[int, ...], height: int, message: str) -> None:
    with pytest.raises(InvalidLayout, match=message):
        validate(LayoutProblem(buffers((0, 2, 4), (1, 3, 4))), placed(offsets, height))


def test_offset_off_its_alignment_is_refused() -> None:
    with pytest.raises(InvalidLayout, match="multiple of 8"):
        validate(LayoutProblem((Buffer("a", 0, 1, 4, 8),)), placed((4,), 8))


def test_bound_above_the_height_is_refused() -> None:
    with pytest.raises(InvalidLayout, match="bound 5"):
        validate(LayoutProblem(buffers((0, 1, 4))), placed((0,), 4, bound=5))


def test_sweep_agrees_with_comparing_all_pairs() -> None:
    draw = random.Random(0)
    verdicts = set()
    for _ in range(500):
        rows = [(start := draw.randrange(8), start + draw.randint(1, 4), draw.randint(1, 4)) for _ in range(5)]
        problem, offsets = LayoutProblem(buffers(*rows)), tuple(draw.randrange(12) for _ in range(5))
        overlaps = any(
            one.meets(other) and at < there + other.size and there < at + one.size
            for (one, at), (other, there) in combinations(zip(problem.buffers, offsets, strict=True), 2)
        )
        verdicts.add(overlaps)
        if overlaps:
            with pytest.raises(InvalidLayout, match="overlap"):
                check_offsets(problem, offsets)
        else:
            check_offsets(problem, offsets)
    assert verdicts == {True, False}
