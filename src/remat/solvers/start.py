"""A schedule that fits, at once: what the portfolio and the exact solvers start from, and fall back to.

In: a `Run`. Out: schedules offered to it: the known strategies and greedy dropping, made to fit and pruned; where none
of them fits, the smallest peak we know how to reach.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.solvers.evict import PRICES, Taste, unit_price
from remat.solvers.floor import lowest_tape, squeeze
from remat.solvers.keep import drop_all_but, first_backward
from remat.solvers.prune import prune, remove_unused
from remat.solvers.run import Run
from remat.solvers.search import SearchLimits, improve
from remat.solvers.strategies import keep_sets
from remat.solvers.tape import Tape

START_S = 2.0
"""How long an exact solver looks for a schedule to start from."""
SEARCH = SearchLimits(rounds=200, patience=60, work=100_000)


def try_strategies(run: Run) -> None:
    """The known strategies, as they are, then pruned where they fit and made to fit where they do not."""
    for name, kept in keep_sets(run.problem):
        tape = run.tape()
        drop_all_but(tape, [kept], [first_backward(run.problem)])
        remove_unused(tape)
        run.offer(tape, name)
        run.fit(tape, Taste(price=PRICES[0] * unit_price(tape)), name)


def try_dropping(run: Run, steps: Sequence[int] = (), source: str = "greedy") -> None:
    """The plain schedule with `steps` added, made to fit by greedy dropping at several prices of a byte."""
    for price in (0.0, *PRICES):
        tape = run.tape(steps)
        run.fit(tape, Taste(price=price * unit_price(tape)), source)
        if run.stop():
            return


def try_squeezing(run: Run) -> Tape:
    """Nothing fits yet: go as low as we can, then take back what the budget allows; returns the lowest tape.

    The second attempt is the one behind `min_budget`, so that a budget which Remat itself named is never refused. The
    third goes for this budget alone, and sometimes gets there where the way to the very bottom passes it by.
    """
    tape = squeeze(run.problem, run.budget, run.overdue)
    if tape.peak > run.budget:
        tape = lowest_tape(run.problem, run.overdue)
    near = tape if tape.peak <= run.budget else lowest_tape(run.problem, run.overdue, run.budget)
    if near.peak <= run.budget:
        prune(near, run.budget)
        run.offer(near, "squeezed")
    return tape


def quick_schedule(problem: Problem, *, clock: Callable[[], float], seed: int) -> Schedule | None:
    """The best of the above after a short search; None where even the smallest peak is over the budget."""
    run = Run(problem, gap=0.0, time_limit_s=START_S, grace_s=START_S, clock=clock, progress=None)
    try_strategies(run)
    try_dropping(run)
    if run.best is None:
        try_squeezing(run)
    if run.best is not None:
        improve(run.tape(run.best), run.budget, SEARCH, seed, run.stop, run.offer_found)
    return run.schedule()


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
    try_dropping(run, tuple(steps), "repair")
    return run.schedule()
