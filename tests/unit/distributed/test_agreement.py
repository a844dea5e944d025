"""Ranks that meet and plan for each other, as threads over one store."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

from torch import distributed

from remat.core.problem import Costs
from remat.distributed.agreement import processes, ranks, vigil
from remat.distributed.agreement.agreed import Alone, Together
from remat.distributed.agreement.facts import Facts
from remat.distributed.agreement.processes import has_ended, introduce_process, own_process, process_key
from remat.distributed.agreement.ranks import Ranks, named
from remat.errors import InfeasibleBudget, RankLost, RanksDiffer, RematError

if not distributed.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

FACTS = Facts("0.1", "2.13", "cpu", "4", "0.6x", "auto", "", "12 parameters", "float32[8, 64]", "abc")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody is patient for a shorter time than in real jobs."""
    monkeypatch.setattr(ranks, "GRACE_S", 0.2)
    monkeypatch.setattr(ranks, "SLICE_S", 0.1)
    monkeypatch.setattr(ranks, "PRECEDENCE_S", 0.3)
    monkeypatch.setattr(ranks, "BEAT_S", 0.1)
    monkeypatch.setattr(ranks, "LINGER_S", 0.5)
    monkeypatch.setattr(vigil, "LOOK_S", 0.1)


def on_ranks(count: int, work: Callable[[Together], Any], *, timeout_s: float = 20.0, absent: int = -1) -> list[Any]:
    """What `work` returns or raises on each of `count` ranks, but one that never comes."""
    store = distributed.HashStore()
    found: list[Any] = [None] * count

    def run(place: int) -> None:
        together = Together(Ranks(store, place, tuple(range(count)), timeout_s))
        try:
            found[place] = work(together)
        except RematError as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(count) if place != absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "nobody hangs"
    return found


def said_by(together: Together, **differing: dict[int, str]) -> Callable[[], tuple[Facts, int]]:
    own = {name: values[together.peers.own] for name, values in differing.items() if together.peers.own in values}
    return lambda: (replace(FACTS, **own), 1000 + together.peers.own)


def test_ranks_that_are_alike_meet_and_know_the_fullest() -> None:
    def work(together: Together) -> int:
        together.meet(said_by(together))
        return together.more_bytes()

    assert on_ranks(5, work) == [4, 3, 2, 1, 0]


@pytest.mark.parametrize("name", ["torch_version", "device", "budget", "parameters", "model", "plan"])
def test_rank_that_differs_is_named_on_every_rank_with_what_differs(name: str) -> None:
    def work(together: Together) -> None:
        together.meet(said_by(together, **{name: {2: "other"}}))

    errors = on_ranks(4, work)
    assert all(type(error) is RanksDiffer for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith("Rank 2 differs from rank 0 in ")
    assert "other there" in str(errors[0])


def test_difference_is_told_although_a_rank_has_not_come() -> None:
    def work(together: Together) -> None:
        together.meet(said_by(together, device={3: "cuda"}))

    began = time.monotonic()
    errors = on_ranks(4, work, absent=1, timeout_s=60)
    assert {type(error) for place, error in enumerate(errors) if place != 1} == {RanksDiffer}
    assert time.monotonic() - began < 30, "long before the timeout"


def test_rank_that_does_not_come_is_named_when_the_timeout_ends() -> None:
    errors = on_ranks(3, lambda together: together.meet(said_by(together)), absent=1, timeout_s=1.0)
    assert type(errors[0]) is RankLost
    assert str(errors[0]) == str(errors[2])
    assert str(errors[0]).startswith("Rank 1 did not come")


@pytest.mark.skipif(not own_process(), reason="the system does not tell of processes")
def test_rank_whose_process_has_ended_is_named_long_before_the_timeout() -> None:
    gone = gone_process()

    def work(together: Together) -> None:
        together.peers.store.set(process_key(1), gone)
        together.meet(said_by(together))

    errors = on_ranks(3, work, absent=1, timeout_s=60)
    assert str(errors[0]).startswith("Rank 1 ended before this step could be planned")
    assert str(errors[0]) == str(errors[2])


def gone_process() -> str:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return f"{own_process().rpartition(' ')[0]} {child.pid}"


@pytest.mark.skipif(not own_process(), reason="the system does not tell of processes")
def test_rank_that_ends_while_others_plan_stops_them_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gone, ended, stopped = gone_process(), threading.Event(), [False]

    def find() -> int:
        ended.set()
        for _ in range(200):
            time.sleep(0.1)
        stopped[0] = True
        return 5

    def work(together: Together) -> int:
        if together.peers.own == 2:
            together.peers.attend(True)
            assert ended.wait(20)
            with monkeypatch.context() as patch:
                patch.setattr(processes, "own_process", lambda: gone)
                introduce_process(together.peers.store, 2)
            return 0
        with together.attending():
            return together.number("plan", find)

    began = time.monotonic()
    errors = on_ranks(3, work)
    assert time.monotonic() - began < 5
    assert not stopped[0]
    assert {(type(error), str(error)) for error in errors[:2]} == {
        (RankLost, "Rank 2 ended before this step could be planned; see why, and start all ranks again.")
    }


@pytest.mark.skipif(not own_process(), reason="the system does not tell of processes")
def test_rank_that_has_done_its_part_may_end() -> None:
    gone = gone_process()

    def work(together: Together) -> int:
        if together.peers.own == 1:
            together.peers.attend(False)
            together.peers.store.set(processes._list_key(gone) + "/1", f"1 {gone}")
            together.peers.store.add(processes._list_key(gone), 1)
            return 1
        with together.attending():
            time.sleep(0.5)
        return 0

    assert on_ranks(2, work) == [0, 1]


def test_rank_that_stops_while_others_plan_stops_them_after_the_timeout() -> None:
    def work(together: Together) -> int:
        if together.peers.own == 1:
            together.peers.attend(True)
            return 0
        with together.attending():
            for _ in range(200):
                time.sleep(0.1)
        return 1

    began = time.monotonic()
    errors = on_ranks(3, work, timeout_s=1.0)
    assert time.monotonic() - began < 5
    assert {str(errors[0]), str(errors[2])} == {
        "Rank 1 was not heard of for 1 s before this step could be planned; see why, and start all ranks again."
    }


def test_rank_that_is_heard_of_may_take_longer_than_the_timeout_to_come() -> None:
    def work(together: Together) -> str:
        with together.attending():
            if together.peers.own == 1:
                time.sleep(1.5)
            together.meet(said_by(together))
        return "met"

    assert on_ranks(2, work, timeout_s=0.7) == ["met", "met"]


def test_processes_of_other_machines_are_not_taken_to_have_ended() -> None:
    assert not has_ended(own_process())
    assert not has_ended("another-machine 4026531836 1")
    assert not has_ended("")


def test_first_rank_that_does_not_come_is_named() -> None:
    errors = on_ranks(3, lambda together: together.meet(said_by(together)), absent=0, timeout_s=1.0)
    assert {str(error) for error in errors[1:]} == {str(errors[1])}
    assert "Rank 0" in str(errors[1])


def test_rank_that_fails_before_it_could_meet_is_named_on_the_others() -> None:
    def work(together: Together) -> None:
        if together.peers.own == 1:
            together.leave(ValueError("no such file"))
        else:
            together.meet(said_by(together))

    errors = on_ranks(3, work)
    assert errors[1] is None
    assert "Rank 1" in str(errors[0])
    assert "ValueError: no such file" in str(errors[0])
    assert str(errors[0]) == str(errors[2])


def test_first_rank_that_fails_before_it_could_meet_is_named_on_the_others() -> None:
    def work(together: Together) -> None:
        if together.peers.own == 0:
            together.leave(ValueError("no such file"))
        else:
            together.meet(said_by(together))

    errors = on_ranks(3, work)
    assert "Rank 0 failed before this step could be planned (ValueError: no such file)" in str(errors[1])


def test_other_shapes_are_told_and_allowed_unless_graphs_meet() -> None:
    def work(together: Together, is_bound: bool) -> str:
        together.meet(said_by(together, shapes={1: "float32[4, 64]"}, model={1: "def"}), is_bound=is_bound)
        return "met"

    with pytest.warns(UserWarning, match="Rank 1 differs from rank 0 in shapes"):
        assert on_ranks(3, lambda together: work(together, False)) == ["met"] * 3
    assert {type(error) for error in on_ranks(3, lambda together: work(together, True))} == {RanksDiffer}


def test_one_rank_measures_and_all_have_its_costs() -> None:
    measured: list[int] = []

    def work(together: Together) -> Costs:
        together.meet(said_by(together))

        def find() -> Costs:
            measured.append(together.peers.own)
            return Costs((0.1 * (1 + together.peers.own),), (8,), (16,))

        return together.costs("graph", find)

    found = on_ranks(6, work)
    assert found == [Costs((0.1,), (8,), (16,))] * 6
    assert measured == [0]


def test_what_only_some_ask_for_keeps_nobody_waiting() -> None:
    def work(together: Together) -> int:
        together.meet(said_by(together))
        return together.number("shape", lambda: 7) if together.peers.own > 1 else -1

    assert on_ranks(4, work, timeout_s=60) == [-1, -1, 7, 7]


def test_what_is_asked_for_again_is_found_again() -> None:
    def work(together: Together) -> list[int]:
        together.meet(said_by(together))
        return [together.number("plan", lambda number=number: number) for number in range(3)]

    assert on_ranks(3, work) == [[0, 1, 2]] * 3


def test_refusal_is_the_same_on_every_rank() -> None:
    def refuse() -> int:
        raise InfeasibleBudget("Budget 1 MiB is below 2 MiB.", 2**21)

    def work(together: Together) -> int:
        together.meet(said_by(together))
        return together.number("plan", refuse)

    errors = on_ranks(4, work)
    assert {(type(error), str(error), error.min_budget) for error in errors} == {
        (InfeasibleBudget, "Budget 1 MiB is below 2 MiB.", 2**21)
    }


def test_refusal_for_one_shape_is_raised_on_ranks_with_others() -> None:
    def work(together: Together) -> str:
        together.meet(said_by(together, shapes={1: "float32[4, 64]"}))

        def find() -> str:
            if together.peers.own == 1:
                raise InfeasibleBudget("Budget 1 MiB is below 2 MiB.", 2**21)
            return "planned"

        return together.unanimous(find)

    with pytest.warns(UserWarning, match="shapes"):
        errors = on_ranks(3, work)
    assert {(type(error), str(error)) for error in errors} == {(InfeasibleBudget, "Budget 1 MiB is below 2 MiB.")}


def test_failure_of_the_planning_rank_is_an_error_on_the_others() -> None:
    def work(together: Together) -> int:
        together.meet(said_by(together))

        def find() -> int:
            raise TypeError("no such op")

        if together.peers.own > 0:
            return together.number("plan", find)
        with pytest.raises(TypeError):
            together.number("plan", find)
        return -1

    errors = on_ranks(3, work)
    assert errors[0] == -1
    assert "Rank 0 could not plan this step for all ranks: TypeError: no such op" in str(errors[1])


def test_planning_may_take_longer_than_the_timeout_while_its_rank_is_heard_of() -> None:
    def work(together: Together) -> int:
        together.meet(said_by(together))

        def find() -> int:
            time.sleep(1.5)
            return 5

        return together.number("plan", find)

    assert on_ranks(3, work, timeout_s=0.7) == [5] * 3


def test_planning_rank_that_falls_silent_is_named() -> None:
    def work(together: Together) -> int:
        together.meet(said_by(together))
        if together.peers.own == 0:
            key = "claimed"
            together.peers.store.add(f"claim/{key}", 1)
            together.peers.store.set(f"by/{key}", "0")
            return 0
        return int(together.peers.share("claimed", lambda: 1, leader=0))

    errors = on_ranks(2, work, timeout_s=1.0)
    assert type(errors[1]) is RankLost
    assert str(errors[1]).startswith("Rank 0 plans this step for all ranks and has not been heard of")


def test_one_rank_alone_finds_everything_itself() -> None:
    alone = Alone()
    alone.meet(lambda: (FACTS, 0))
    assert (alone.number("x", lambda: 3), alone.more_bytes(), alone.ranks) == (3, 0, 1)


def test_ranks_are_named_up_to_eight() -> None:
    assert named([3]) == "Rank 3"
    assert named([1, 2, 5]) == "Ranks 1, 2 and 5"
    assert named(list(range(12))) == "Ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more"
