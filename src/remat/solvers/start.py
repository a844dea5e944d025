"""A schedule that fits, at once: what exact solvers start from, and fall back to.

In: a problem. Out: the fastest of the known strategies and of greedy dropping, made to fit and pruned, after a short
search; None where even the smallest peak we know how to reach is over the budget.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.solvers.evict import PRICES, Taste, unit_price
from remat.solvers.floor import lowest_tape, squeeze
from remat.solvers.keep import drop_all_but, first_backward
from remat.solvers.prune import prune, remove_unused
from remat.solvers.run import Run
from remat.solvers.search import SearchLimits, improve
from remat.solvers.strategies import keep_sets

START_S = 2.0
"""How long an exact solver looks for a schedule to start from."""
SEARCH = SearchLimits(rounds=200, patience=60, work=100_000)


def quick_schedule(problem: Problem, *, time_limit_s: float, clock: Callable[[], float], seed: int) -> Schedule | None:
    """The best of a few quick strategies; with no time left, the first that fits."""
    run = Run(problem, gap=0.0, time_limit_s=time_limit_s, clock=clock, progress=None)
    for _, kept in keep_sets(problem):
        tape = run.tape()
        drop_all_but(tape, [kept], [first_backward(problem)])
        remove_unused(tape)
        run.offer(tape, "")
        fit(run, tape.extra_steps(), PRICES[:1])
    fit(run, (), (0.0, *PRICES))
    if run.best is None:
        _squeeze(run)
    if run.best is not None:
        improve(run.tape(run.best), run.budget, SEARCH, seed, run.stop, run.offer_found)
    return run.schedule()


def _squeeze(run: Run) -> None:
    """Nothing fits yet: go as low as we can, then take back what the budget allows."""
    until = run.clock() + START_S
    for lowest in (partial(squeeze, run.problem, run.budget), partial(lowest_tape, run.problem)):
        tape = lowest(stop=lambda: run.clock() > until)
        if tape.peak <= run.budget:
            prune(tape, run.budget)
            run.offer(tape, "")
            return


def repair(problem: Problem, schedule: Schedule, *, time_limit_s: float, clock: Callable[[], float]) -> Schedule | None:
    """A schedule that may be over the budget, made to fit; stages run their ops in graph order, once each."""
    run = Run(problem, gap=0.0, time_limit_s=time_limit_s, clock=clock, progress=None)
    count = len(problem.graph.ops)
    newest, steps = -1, dict[int, None]()
    for number in schedule.steps:
        if number > newest:
            newest = number
        else:
            steps[(newest + 1) * count + number] = None
    fit(run, tuple(steps), (0.0, *PRICES))
    return run.schedule()


def fit(run: Run, steps: tuple[int, ...] | list[int], prices: tuple[float, ...]) -> None:
    """Add `steps` to the plain schedule, make it fit at several prices of a byte, and offer what comes out."""
    for price in prices:
        if run.stop():
            return
        tape = run.tape(steps)
        run.fit(tape, Taste(price=price * unit_price(tape)), "")
