"""Kernels become one, and freed memory is held, only where there is room."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from remat.core.solution import Solution, Status
from remat.inductor._compat.kernels import PlannedKernel
from remat.inductor.joining import Room, rooms_of
from remat.inductor.model.choose import Choice
from remat.inductor.model.joint import Half, Joint, JointNode, Kind
from remat.inductor.model.predict import Moment, Prediction

LIVE = [10, 50, 80, 30, 20]
NODES = [
    JointNode(f"node_{number}", "test", kind, Half.FORWARD, (), number, 1, 1, recomputable=True)
    for number, kind in enumerate((Kind.INPUT, Kind.ALONE, Kind.FUSED))
]
JOINT = Joint(tuple(NODES), frozenset(), frozenset())


def room(most: int) -> Room:
    """Node 100 runs first, 101 second, and so on."""
    places = {100 + place: place for place in range(len(LIVE))}
    return Room(places, list(LIVE), most, list(range(len(LIVE))))


def kernel(*nodes: int, made: int = 0, before: tuple[PlannedKernel, ...] = ()) -> PlannedKernel:
    return PlannedKernel(frozenset(nodes), made, before)


def test_later_kernel_needs_room_from_the_earlier_one_on() -> None:
    early, late = kernel(101, made=5), kernel(103, made=20)
    assert room(100).for_one(early, late) and room(100).for_one(late, early)
    assert not room(99).for_one(early, late)


def test_what_the_later_kernel_waits_for_comes_earlier_too() -> None:
    late = kernel(103, made=20, before=(kernel(102, made=5), kernel(100, made=99)))
    assert room(105).for_one(kernel(101), late) and not room(104).for_one(kernel(101), late)


def test_neighbours_need_no_room() -> None:
    found = room(0)
    found.stages = [0] * len(LIVE)
    assert found.for_one(kernel(101, made=9), kernel(103, made=9)) and found.live_bytes == LIVE


def test_room_is_given_once() -> None:
    found = room(100)
    assert found.for_one(kernel(101), kernel(103, made=20))
    assert found.for_one(kernel(101), kernel(103, made=20))
    assert not found.to_hold(kernel(101), kernel(103), 1)


def test_a_kernel_is_where_the_first_of_those_that_it_was_made_of_was() -> None:
    found = room(110)
    found.stages = [0, 1, 2, 3, 3]
    early, late = kernel(101), kernel(103, made=20)
    assert found.for_one(early, late)
    both = kernel(101, 103, made=20)
    # By itself the later one is a neighbour of the last, but now it runs before what needs the most.
    assert not found.for_one(both, kernel(104, made=20)) and found.for_one(late, kernel(104, made=20))
    assert found.for_one(both, kernel(104, made=10))
    assert not found.to_hold(kernel(101, 103, 104), kernel(104), 1)


def test_held_memory_adds_up() -> None:
    found = room(100)
    assert found.to_hold(kernel(101), kernel(103), 15)
    assert not found.to_hold(kernel(101), kernel(104), 10)
    assert found.to_hold(kernel(102), kernel(104), 10)


def test_kernels_that_nobody_foresaw_may_be_one_and_hold_nothing() -> None:
    assert room(0).for_one(kernel(7, made=10**9), kernel(101))
    assert not room(10**9).to_hold(kernel(7), kernel(101), 1)


def test_each_half_has_its_own_moments_and_no_less_than_is_predicted() -> None:
    moments = (Moment(1, False, 1, 40, 0.0), Moment(2, True, 2, 70, 0.0), Moment(1, True, 2, 60, 0.0))
    prediction = Prediction(moments, 0.0, 0.0, 0, frozenset())
    solution = Solution(Status.FEASIBLE, None, 0.0, 0, 0.0, 0.0, "test")
    rooms = rooms_of(JOINT, Choice(frozenset(), prediction, solution), 50)
    assert (rooms.forward.places, rooms.forward.live_bytes) == ({1: 0}, [40])
    assert (rooms.backward.places, rooms.backward.live_bytes) == ({2: 0, 1: 1}, [70, 60])
    assert rooms.forward.stages == [0, 1] and rooms.backward.stages == [0, 0, 1]
    assert rooms.forward.most_bytes == rooms.backward.most_bytes == 70


kernels = st.builds(lambda place, made: kernel(100 + place, made=made), st.integers(0, 4), st.integers(0, 60))


@given(st.integers(80, 150), st.lists(st.tuples(kernels, kernels, st.booleans())))
def test_never_more_than_there_may_be(most: int, asked: list[tuple[PlannedKernel, PlannedKernel, bool]]) -> None:
    found = room(most)
    for one, other, joins in asked:
        found.for_one(one, other) if joins else found.to_hold(one, other, other.made_bytes)
    assert max(found.live_bytes) <= most
    assert all(now >= before for now, before in zip(found.live_bytes, LIVE, strict=True))
