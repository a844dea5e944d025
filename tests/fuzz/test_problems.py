"""Random problems and every promise of a solver, a few in every run and thousands with `--long`."""

from __future__ import annotations

import pytest
from tests.fuzz.problems import SLOW_SOLVERS, SOLVERS, run


@pytest.mark.parametrize("first", range(0, 48, 8))
def test_solvers_keep_their_promises_on_random_problems(first: int) -> None:
    tally = run(range(first, first + 8), SOLVERS)
    assert tally.broken == ()
    assert tally.solves == 8 * len(SOLVERS)


@pytest.mark.parametrize("solver", SLOW_SOLVERS)
def test_slow_solvers_keep_their_promises_on_random_problems(solver: str) -> None:
    assert run((3, 5), (solver,)).broken == ()


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 5000, 500))
def test_solvers_keep_their_promises_on_thousands_of_random_problems(first: int) -> None:
    assert run(range(first, first + 500), SOLVERS, slow_every=50).broken == ()
