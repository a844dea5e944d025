"""Every solver on problems at the edge of sense: a valid schedule, or the one error that says what is needed."""

from __future__ import annotations

import pytest

from remat.core import Problem, floor_bytes, validate
from remat.errors import InfeasibleBudget
from remat.solvers import REGISTRY, Solver, solve
from remat.solvers.sweep import plain_peak_bytes
from remat.zoo.recorder import Builder
from remat.zoo.synthetic import chain

SOLVERS = pytest.mark.parametrize("solver", REGISTRY, ids=lambda solver: solver.name)
LIMIT_S = 0.3


def skipping(sizes: list[int], times: list[float], outputs: list[int]) -> Problem:
    """A chain whose last op also reads the first."""
    build = Builder()
    for number, (size, time) in enumerate(zip(sizes, times, strict=True)):
        inputs = [number - 1] if number else []
        build.add(f"op{number}", inputs + [0] * (number == len(sizes) - 1 > 1), [size], time, backward=number > 2)
    return build.problem(outputs)


def disconnected() -> Problem:
    build = Builder()
    for part in range(3):
        (first,) = build.add(f"a{part}", [], [10], 1)
        (second,) = build.add(f"b{part}", [first], [10], 2)
        build.add(f"c{part}", [first, second], [10], 3)
    return build.problem([2, 8])


PROBLEMS = {
    "empty": Builder().problem([]),
    "single": skipping([10], [1], [0]),
    "single without output": skipping([10], [1], []),
    "zero sizes": skipping([0] * 6, [1] * 6, [5]),
    "zero times": skipping([10] * 6, [0] * 6, [5]),
    "zero everything": skipping([0] * 6, [0] * 6, [5]),
    "huge sizes": skipping([2**59] * 6, [1] * 6, [5]),
    "huge and tiny times": skipping([10] * 6, [1e-300, 2.0**62, 1e-300, 1, 2**62, 1e-9], [5]),
    "everything an output": skipping([10] * 6, [1] * 6, list(range(6))),
    "nothing an output": skipping([10] * 6, [1] * 6, []),
    "disconnected": disconnected(),
}


def attempt(problem: Problem, solver: Solver, **options: float) -> bool:
    """Did the solver find a schedule? It must be right whatever it says."""
    try:
        found = solve(problem, solver, **{"time_limit_s": LIMIT_S, **options})
    except InfeasibleBudget as error:
        assert "\n" not in str(error)
        return False
    assert found.schedule is not None
    validate(problem, found.schedule)
    assert found.bound_ns <= found.time_ns
    return True


@SOLVERS
@pytest.mark.parametrize("name", PROBLEMS)
def test_plain_peak_is_enough(solver: Solver, name: str) -> None:
    problem = PROBLEMS[name].with_budget(plain_peak_bytes(PROBLEMS[name]))
    fits = attempt(problem, solver)
    if solver.name in ("auto", "none"):
        assert fits


@SOLVERS
@pytest.mark.parametrize("name", PROBLEMS)
def test_budget_at_the_floor_and_below_is_answered(solver: Solver, name: str) -> None:
    floor, _ = floor_bytes(PROBLEMS[name])
    attempt(PROBLEMS[name].with_budget(floor), solver)
    assert not attempt(PROBLEMS[name].with_budget(floor - 1), solver)


@SOLVERS
@pytest.mark.parametrize("options", [{"time_limit_s": 0.0}, {"time_limit_s": -1.0}, {"seed": -7}, {"seed": 2**70}])
def test_odd_limits_and_seeds_are_answered(solver: Solver, options: dict[str, float]) -> None:
    problem = chain(3)
    attempt(problem.with_budget(int(0.8 * plain_peak_bytes(problem))), solver, **options)
