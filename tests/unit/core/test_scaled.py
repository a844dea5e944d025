"""A problem as a function of its size: values exact, workspaces rounded up, the plain step with its kernels' needs."""

from __future__ import annotations

import pytest

from remat.core.fit import ExactLaw, fit
from remat.core.graph import Graph, Op, ValueId
from remat.core.scaled import ScaledOp, ScaledProblem, fit_bytes

SIZES = (2, 4, 6, 9)
GRAPH = Graph((Op("f", (), (ValueId(0),)), Op("b", (ValueId(0),), (ValueId(1),), backward=True)), 2, (ValueId(1),))


def scaled(grain_bytes: int = 1) -> ScaledProblem:
    return ScaledProblem(
        graph=GRAPH,
        times=tuple(fit(SIZES, [pace * size for size in SIZES], degree=1) for pace in (3.0, 5.0)),
        workspaces=(fit_bytes(SIZES, [0] * 4), fit_bytes(SIZES, [7 * size for size in SIZES])),
        values=(ExactLaw((0, 100), 1), ExactLaw((40,), 1)),
        resident=ExactLaw((1000, 10), 1),
        plain=(
            ScaledOp(ExactLaw((0, 100), 1), ExactLaw((0,), 1)),
            ScaledOp(ExactLaw((0, 95), 1), ExactLaw((0, 7), 1)),
            ScaledOp(ExactLaw((5,), 1), ExactLaw((0,), 1)),
        ),
        grain_bytes=grain_bytes,
    )


def test_costs_at_a_size_nobody_measured() -> None:
    problem = scaled().at(20, budget_bytes=9)
    assert problem.costs.size_bytes == (2000, 40)
    assert problem.costs.workspace_bytes == (0, 140)
    assert problem.base_time_ns == pytest.approx(160.0)
    assert (problem.resident_bytes, problem.budget_bytes) == (1200, 9)


def test_values_are_rounded_as_the_allocator_rounds_them() -> None:
    assert scaled(512).at(20).costs.size_bytes == (2048, 512)


def test_plain_peak_counts_a_kernels_workspace_where_it_runs() -> None:
    assert scaled().plain_peak_bytes(20) == 1200 + 1900 + 140


def test_bytes_without_an_exact_law_are_fitted_and_whole() -> None:
    law = fit_bytes(SIZES, (100, 210, 290, 460))
    found = ScaledProblem(GRAPH, scaled().times, (law, law), scaled().values, law, ()).at(7)
    assert isinstance(found.resident_bytes, int)
    assert 300 < found.resident_bytes < 400
