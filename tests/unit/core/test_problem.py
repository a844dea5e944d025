"""Costs that make no sense are refused where a problem is made, in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from remat.core import Costs, Graph, Op, Problem, ValueId
from remat.errors import BudgetError, InvalidGraph

GRAPH = Graph((Op("a", (), (ValueId(0),)), Op("b", (ValueId(0),), (ValueId(1),))), 2, (ValueId(1),))
COSTS: dict[str, Any] = {"time_ns": (1, 1), "workspace_bytes": (0, 0), "size_bytes": (1, 1)}


def test_zeros_and_fractions_of_time_are_fine() -> None:
    costs = Costs(time_ns=(0, 0.5), workspace_bytes=(0, 0), size_bytes=(0, 0))
    assert Problem(GRAPH, costs, 0).base_time_ns == 0.5


@pytest.mark.parametrize("field", COSTS)
@pytest.mark.parametrize(
    "number", [float("nan"), float("inf"), -float("inf"), 10**400, 10**5000, -(10**5000)], ids=lambda _: ""
)
def test_refuses_an_impossible_cost(field: str, number: float) -> None:
    with pytest.raises(InvalidGraph, match=r"at position 1 is .*; it must be a number from 0 to 2\*\*62"):
        Problem(GRAPH, Costs(**{**COSTS, field: (1, number)}), 10)


@pytest.mark.parametrize("field", ["time_ns", "size_bytes"])
def test_refuses_a_negative_cost(field: str) -> None:
    with pytest.raises(InvalidGraph, match="at position 1 is negative"):
        Problem(GRAPH, Costs(**{**COSTS, field: (1, -1)}), 10)


@pytest.mark.parametrize("number", [-1, float("nan"), 10**5000], ids=lambda _: "")
def test_refuses_impossible_resident_bytes(number: Any) -> None:
    with pytest.raises(InvalidGraph, match="`resident_bytes` is"):
        Problem(GRAPH, Costs(**COSTS), 10, number)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_refuses_a_budget_that_is_no_number(number: Any) -> None:
    with pytest.raises(BudgetError, match="finite"):
        Problem(GRAPH, Costs(**COSTS), number)


def test_refuses_sizes_whose_sum_is_too_large() -> None:
    with pytest.raises(InvalidGraph, match="larger unit"):
        Problem(GRAPH, Costs((1, 1), (0, 0), (2**61, 2**62)), 10)


def test_refuses_costs_of_another_graph() -> None:
    with pytest.raises(InvalidGraph, match="measure this graph"):
        Problem(GRAPH, Costs((1,), (0, 0), (1, 1)), 10)
