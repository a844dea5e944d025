"""Collecting only what is new."""

from __future__ import annotations

import gc

import pytest

from remat.core.garbage import NEW_OBJECTS, collecting_only_what_is_new, collecting_rarely


def test_what_was_there_is_left_alone_and_comes_back() -> None:
    before = gc.get_freeze_count()
    with collecting_only_what_is_new():
        assert gc.get_freeze_count() > 0
        with collecting_only_what_is_new():
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() > 0, "the inner one leaves it as it was"
    assert gc.get_freeze_count() == before


def test_an_error_does_not_leave_it_frozen() -> None:
    before = gc.get_freeze_count()
    with pytest.raises(KeyError), collecting_only_what_is_new():
        raise KeyError
    assert gc.get_freeze_count() == before


@pytest.mark.parametrize("often", [0, 700])
def test_garbage_is_looked_for_less_often_and_then_as_before(often: int) -> None:
    before = gc.get_threshold()
    gc.set_threshold(often, *before[1:])
    try:
        with collecting_only_what_is_new():
            assert gc.get_threshold()[0] == (NEW_OBJECTS if often else 0), "who turned it off wants it off"
        assert gc.get_threshold() == (often, *before[1:])
    finally:
        gc.set_threshold(*before)


def test_what_was_there_is_still_found_while_garbage_is_looked_for_rarely() -> None:
    known, before = [object()], gc.get_threshold()
    with pytest.raises(KeyError), collecting_rarely():
        assert gc.get_threshold()[0] >= NEW_OBJECTS
        assert any(item is known for item in gc.get_objects())
        raise KeyError
    assert gc.get_threshold() == before
