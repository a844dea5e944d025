"""What may be written over: inputs at their last read that nobody else can see, and nothing else."""

from __future__ import annotations

import pytest

from remat.core import Costs, Graph, Op, OpId, Plan, Problem, Schedule, ValueId, plain_schedule
from remat.core.results.plan import Fingerprint
from remat.core.results.replay import replay_plain
from remat.core.solution import Solution, Status
from remat.layout import LayoutProblem, load
from remat.layout.examples import exp_of_sum, two_layer_mlp
from remat.layout.storages import choose_in_place, is_elementwise, merged, storages_of, storages_of_step

Row = tuple[str, str, tuple[int, ...]]


def problem(*rows: Row, outputs: tuple[int, ...] = (), sizes: tuple[int, ...] = ()) -> Problem:
    ops = tuple(
        Op(name, tuple(map(ValueId, read)), (ValueId(number),), target=target)
        for number, (name, target, read) in enumerate(rows)
    )
    graph = Graph(ops, len(ops), tuple(map(ValueId, outputs or (len(ops) - 1,))))
    return Problem(graph, Costs((1.0,) * len(ops), (0,) * len(ops), sizes or (8,) * len(ops)), 10**6)


def pairs(problem: Problem, *steps: int) -> list[tuple[str, str]]:
    schedule = Schedule(tuple(map(OpId, steps))) if steps else plain_schedule(problem.graph)
    found = storages_of(problem, schedule)
    return [(found.buffers[dying].id, found.buffers[born].id) for dying, born in found.in_place]


MM, RELU, ADD = "aten.mm.default", "aten.relu.default", "aten.add.Tensor"


def test_last_reader_may_write_over_its_input() -> None:
    assert pairs(problem(("a", MM, ()), ("b", RELU, (0,)))) == [("0:v0", "1:v1")]


@pytest.mark.parametrize(
    ("why", "given"),
    [
        ("read again later, as a saved value is", problem(("a", MM, ()), ("b", RELU, (0,)), ("c", MM, (0, 1)))),
        ("an output", problem(("a", MM, ()), ("b", RELU, (0,)), outputs=(0, 1))),
        ("not elementwise", problem(("a", MM, ()), ("b", MM, (0,)))),
        ("of another size", problem(("a", MM, ()), ("b", RELU, (0,)), sizes=(8, 4))),
        ("the caller's", problem(("return", "", ()), ("b", RELU, (0,)))),
        ("empty", problem(("a", MM, ()), ("b", RELU, (0,)), sizes=(0, 0))),
    ],
)
def test_nothing_is_written_over_that_is(why: str, given: Problem) -> None:
    assert pairs(given) == [], why


def test_either_of_two_dying_inputs_may_be_written_over() -> None:
    given = problem(("a", MM, ()), ("b", MM, ()), ("c", ADD, (0, 1)))
    assert pairs(given) == [("0:v0", "2:v2"), ("1:v1", "2:v2")]
    assert choose_in_place(storages_of(given, plain_schedule(given.graph))) == ((0, 2),)


def test_a_version_that_is_made_again_may_be_written_over_before() -> None:
    given = problem(("a", MM, ()), ("b", RELU, (0,)), ("c", MM, (0, 1)), outputs=(0, 2))
    assert pairs(given, 0, 1, 0, 2) == [("0:v0", "1:v1")]


def test_a_chain_of_pairs_is_one_buffer() -> None:
    given = exp_of_sum()
    found = storages_of(given, plain_schedule(given.graph))
    (whole,) = merged(found, choose_in_place(found))
    assert (whole.lower, whole.upper, whole.size) == (0, 3, 64)


def test_merging_lowers_the_load_of_the_two_layer_mlp() -> None:
    given = two_layer_mlp()
    found = storages_of(given, plain_schedule(given.graph))
    one = merged(found, choose_in_place(found))
    assert load(LayoutProblem(one)) < load(LayoutProblem(found.buffers))
    assert len(one) == len(found.buffers) - len(choose_in_place(found))


@pytest.mark.parametrize(
    ("target", "expected"),
    [("aten.relu.default", True), ("aten.mm.default", False), ("mine.relu.default", False), ("relu", False)],
)
def test_only_operators_of_aten_are_known_to_be_elementwise(target: str, expected: bool) -> None:
    assert is_elementwise(target) is expected


def test_a_followed_step_has_the_storages_and_pairs_of_its_graph() -> None:
    given = two_layer_mlp()
    schedule = plain_schedule(given.graph)
    solution = Solution(Status.OPTIMAL, schedule, 0.0, 0, 0.0, 0, "none")
    plan = Plan(given, solution, Fingerprint((), "", "cpu", ()), 0)
    step, graph = storages_of_step(replay_plain(plan)), storages_of(given, schedule)
    assert [(b.lower, b.upper, b.size) for b in step.buffers] == [(b.lower, b.upper, b.size) for b in graph.buffers]
    assert set(step.in_place) == set(graph.in_place)
