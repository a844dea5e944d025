"""The load, and what alignment adds to it."""

from __future__ import annotations

from tests.support.layouts import buffers

from remat.layout import Buffer, LayoutProblem, load, lower_bound


def test_load_is_the_most_alive_at_one_time() -> None:
    assert load(LayoutProblem(buffers((0, 3, 5), (2, 4, 7), (3, 5, 6)))) == 13


def test_lives_that_touch_are_not_added() -> None:
    assert load(LayoutProblem(buffers((0, 2, 5), (2, 4, 7)))) == 7


def test_nothing_has_no_load() -> None:
    assert load(LayoutProblem(())) == lower_bound(LayoutProblem(())) == 0


def test_alignment_raises_the_bound_for_all_but_the_highest() -> None:
    problem = LayoutProblem((Buffer("a", 0, 1, 5, 4), Buffer("b", 0, 1, 5, 4)))
    assert (load(problem), lower_bound(problem)) == (10, 13)
