"""Buffers and problems that make no sense are refused in one sentence."""

from __future__ import annotations

import pytest
from tests.support.layouts import buffers

from remat.errors import InvalidLayout
from remat.layout import Buffer, LayoutProblem
from remat.layout.problem import LARGEST_NUMBER


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((3, 3, 1), "lives from 3 to 3"),
        ((3, 2, 1), "lives from 3 to 2"),
        ((0, 1, 0), "has the size 0"),
        ((0, 1, -5), "has the size -5"),
        ((0, 1, 1, 0), "has the alignment 0"),
        ((0, 1, LARGEST_NUMBER + 1), "beyond 2\\*\\*62"),
    ],
)
def test_impossible_buffer_is_refused(fields: tuple[int, ...], message: str) -> None:
    with pytest.raises(InvalidLayout, match=message):
        Buffer("x", *fields)


def test_two_buffers_of_one_id_are_refused() -> None:
    with pytest.raises(InvalidLayout, match="the id a"):
        LayoutProblem((Buffer("a", 0, 1, 1), Buffer("a", 1, 2, 1)))


def test_sizes_beyond_64_bits_are_refused() -> None:
    with pytest.raises(InvalidLayout, match="add up"):
        LayoutProblem(buffers((0, 1, LARGEST_NUMBER - 1), (0, 1, LARGEST_NUMBER - 1)))


def test_negative_capacity_is_refused() -> None:
    with pytest.raises(InvalidLayout, match="capacity is -1"):
        LayoutProblem((), -1)


def test_lives_that_touch_do_not_meet() -> None:
    first, second, third = buffers((0, 2, 1), (2, 4, 1), (1, 3, 1))
    assert not first.meets(second)
    assert first.meets(third) and third.meets(second)
