"""Random problems against every promise of a solver: in, a seed; out, the promises that were broken.

A problem is a chain, layers, a training step with backward or a graph without any form, with ops that overwrite, that
must run once, that need workspace or no time, values without bytes, resident bytes and odd budgets. Most are small
enough for brute force. To run many: `python -m tests.fuzz.problems --count 5000 --seed 0`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tests.contract import graphs
from tests.contract.brute_force import best_time

from remat.core import Problem, floor_bytes, simulate, validate
from remat.core.solution import Solution, Status
from remat.errors import InfeasibleBudget, MissingExtra, RematError
from remat.solvers import solve
from remat.solvers.schedule.overwrite import has_overwrites
from remat.zoo.recorder import Builder

SOLVERS = ("auto", "milp", "chain_dp", "dtr", "pressure", "sqrt_n")
SLOW_SOLVERS = ("cp_sat", "lp_rounding", "genetic")
"""Each takes a second or more, whatever the problem."""
LIMIT_S = 30.0
LARGE_SHARE = 0.06
"""Of problems that are too large for brute force; each takes seconds."""
MOST_VALUES, MOST_OPS = 9, 9
"""Up to here brute force takes a moment."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What a run over many problems came to."""

    problems: int
    solves: int
    infeasible: int
    compared: int
    """Solves that were held against brute force."""
    broken: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.problems} problems, {self.solves} solves ({self.infeasible} infeasible, {self.compared} held "
            f"against brute force): {len(self.broken)} promises broken, {self.seconds:.0f} s"
        )


def make_problem(seed: int) -> Problem:
    """The problem of that seed, with a budget from below the floor to above the plain peak."""
    rng = random.Random(seed)
    is_large = rng.random() < LARGE_SHARE
    problem = rng.choice((_long_chain, _layers, _step) if is_large else (_loose, _loose, _chain))(rng)
    if rng.random() < 0.5:
        problem = graphs.overwriting(problem, seed)
    return problem.with_budget(_budget(problem, rng))


def broken_promises(problem: Problem, solver: str, optimum: float | None, is_small: bool) -> tuple[list[str], bool]:
    """What `solver` does on `problem` that it must not, and whether it found a schedule."""
    try:
        found = solve(problem, solver, time_limit_s=LIMIT_S if solver in ("auto", "milp") else 2.0)
    except InfeasibleBudget as error:
        return list(_of_refusal(problem, solver, error, optimum, is_small)), False
    return list(_of_answer(problem, found, optimum, is_small)), True


def run(
    seeds: Sequence[int], solvers: Sequence[str], slow_every: int = 0, tell: Callable[[Tally], None] | None = None
) -> Tally:
    """Every solver on the problem of every seed, the slow ones on every `slow_every`-th; `tell` hears of the way."""
    start, broken, tally = time.perf_counter(), list[str](), Tally(0, 0, 0, 0, (), 0.0)
    solves = infeasible = compared = 0
    for number, seed in enumerate(seeds):
        problem = make_problem(seed)
        is_small = len(problem.graph.ops) <= MOST_OPS and problem.graph.value_count <= MOST_VALUES
        optimum = best_time(problem) if is_small else None
        for solver in (*solvers, *(SLOW_SOLVERS if slow_every and number % slow_every == 0 else ())):
            try:
                promises, found = broken_promises(problem, solver, optimum, is_small)
            except MissingExtra:
                continue
            except (RematError, ArithmeticError, LookupError, TypeError, ValueError, AssertionError) as error:
                promises, found = [f"raised {type(error).__name__}: {error}"], False
            broken += [f"seed {seed}, {solver}: {promise}" for promise in promises]
            solves, infeasible, compared = solves + 1, infeasible + (not found), compared + is_small
        tally = Tally(number + 1, solves, infeasible, compared, tuple(broken), time.perf_counter() - start)
        if tell is not None and (promises or tally.problems % 250 == 0):
            tell(tally)
    return tally


def _of_answer(problem: Problem, found: Solution, optimum: float | None, is_small: bool) -> Iterator[str]:
    assert found.schedule is not None
    peak, elapsed = validate(problem, found.schedule), simulate(problem, found.schedule).time_ns
    slack = 1e-6 * max(elapsed, 1.0)
    if not peak == found.peak_bytes <= problem.budget_bytes:
        yield f"peak {peak}, stated {found.peak_bytes}, budget {problem.budget_bytes}"
    if abs(elapsed - found.time_ns) > slack:
        yield f"time {elapsed}, stated {found.time_ns}"
    if found.bound_ns > elapsed + slack:
        yield f"time {elapsed} under its own bound {found.bound_ns}"
    if found.status is Status.INFEASIBLE or (found.status is Status.OPTIMAL and found.gap > 1e-6):
        yield f"status {found.status} with a gap of {found.gap}"
    if is_small and optimum is None:
        yield "a schedule where brute force finds none"
    elif is_small and optimum is not None and not found.bound_ns - slack <= optimum <= elapsed + slack:
        yield f"bound {found.bound_ns}, time {elapsed}, optimum {optimum}"


def _of_refusal(
    problem: Problem, solver: str, error: InfeasibleBudget, optimum: float | None, is_small: bool
) -> Iterator[str]:
    if "\n" in str(error) or not str(error):
        yield "a refusal that is not one line"
    if error.min_budget <= problem.budget_bytes:
        yield f"a smallest budget of {error.min_budget} for a budget of {problem.budget_bytes}"
    # Who knows nothing of overwriting finds less; `auto` must find whatever there is.
    is_complete = solver == "auto" or (solver == "milp" and not has_overwrites(problem))
    if is_small and is_complete and optimum is not None:
        yield f"infeasible where brute force takes {optimum}"
    if is_small and best_time(problem.with_budget(error.min_budget)) is None:
        yield f"a smallest budget of {error.min_budget} that nothing fits"


def _budget(problem: Problem, rng: random.Random) -> int:
    floor, plain = floor_bytes(problem)[0], graphs.peak(problem)
    between = rng.randint(min(floor, plain), max(floor, plain))
    return rng.choice((floor - 1, floor, floor + 1, plain, plain - 1, plain * 3, between, between, between, between, 0))


def _size(rng: random.Random) -> int:
    return rng.choice((0, 1, 2, 3, 5, 8, 13, 40))


def _flags(rng: random.Random) -> dict[str, object]:
    return {"workspace": rng.choice((0, 0, 0, 1, 6)), "recomputable": rng.random() > 0.1}


def _loose(rng: random.Random) -> Problem:
    """A graph without any form."""
    build, values = Builder(), list[int]()
    count = rng.randint(1, 8)
    for number in range(count):
        inputs = rng.sample(values, min(len(values), rng.randint(0, 3)))
        if values and rng.random() < 0.5 and values[-1] not in inputs:
            inputs.append(values[-1])
        sizes = [_size(rng) for _ in range(rng.choice((1, 1, 1, 2)))]
        backward = number > count // 2 and rng.random() < 0.8
        values += build.add(f"op{number}", inputs, sizes, rng.choice((0, 1, 3, 7)), backward=backward, **_flags(rng))
    return build.problem(rng.sample(values, min(len(values), rng.randint(0, 2))), "loose", rng.choice((0, 0, 9)))


def _long_chain(rng: random.Random) -> Problem:
    return _chain(rng, rng.randint(6, 12))


def _chain(rng: random.Random, length: int = 0) -> Problem:
    """A chain there and back; each gradient reads what its op read or made."""
    length = length or rng.randint(1, 5)
    build = Builder()
    values = build.add("input", [], [_size(rng)], 1, **_flags(rng))
    for number in range(length - 1):
        values += build.add(f"f{number}", [values[-1]], [_size(rng)], rng.randint(0, 9), **_flags(rng))
    gradient = values[-1]
    for number in reversed(range(length - 1)):
        read = sorted({values[number], gradient, *([values[number + 1]] if rng.random() < 0.5 else [])})
        gradient = build.add(f"b{number}", read, [_size(rng)], rng.randint(1, 9), backward=True)[0]
    return build.problem([gradient], "chain", rng.choice((0, 5)))


def _layers(rng: random.Random) -> Problem:
    return graphs.layered(rng.randrange(10_000), layers=rng.randint(1, 5), width=rng.randint(1, 3))


def _step(rng: random.Random) -> Problem:
    return graphs.transformer(rng.randint(1, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slow-every", type=int, default=50, help="how often the slow solvers have their turn")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.count)
    tally = run(seeds, SOLVERS, options.slow_every, lambda so_far: print(so_far, file=sys.stderr))
    print(*tally.broken, tally, sep="\n")


if __name__ == "__main__":
    main()
