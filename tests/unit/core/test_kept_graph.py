"""The peak of a step whose backward keeps its graph."""

from __future__ import annotations

from remat.core.graph import Graph, Op, OpId, ValueId
from remat.core.kept_graph import peak_with_kept_graph
from remat.core.problem import Costs, Problem
from remat.core.schedule import plain_schedule
from remat.core.simulate import simulate


def _value(*numbers: int) -> tuple[ValueId, ...]:
    return tuple(ValueId(number) for number in numbers)


def _problem() -> Problem:
    """Two activations that backward reads one after the other, and a gradient from each."""
    ops = (
        Op("first", (), _value(0)),
        Op("second", _value(0), _value(1)),
        Op("return", _value(1), _value(2), recomputable=False),
        Op("of second", _value(1, 2), _value(3), backward=True),
        Op("of first", _value(0, 3), _value(4), backward=True),
    )
    graph = Graph(ops, 5, _value(3, 4))
    return Problem(graph, Costs((1.0,) * 5, (0,) * 5, (100, 100, 4, 10, 10)), budget_bytes=1000)


def test_saved_values_stay_to_the_end_of_a_backward_that_keeps_its_graph() -> None:
    problem = _problem()
    schedule = plain_schedule(problem.graph)
    # Without: 100 + 100 + 4 + 10 while the second's gradient is computed. With: both activations and both gradients
    # in the first backward; in the one that follows, the first's gradients are there besides.
    assert simulate(problem, schedule).peak_bytes == 214
    assert peak_with_kept_graph(problem, schedule, OpId(2), 1) == 214 + 20


def test_every_backward_but_the_last_keeps_everything() -> None:
    problem = _problem()
    schedule = plain_schedule(problem.graph)
    once, twice = (peak_with_kept_graph(problem, schedule, OpId(2), times) for times in (1, 2))
    assert twice >= once
    assert twice == 100 + 100 + 10 + 10 + 20
