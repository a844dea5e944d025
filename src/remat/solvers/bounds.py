"""Bounds and schedules from the cut program: choose where to cut, solve, build, and cut again where it overflows.

In: a `Run`. Out: a bound on recomputation and schedules offered to the run. One cut at the tightest op is often within
a fraction of a percent; graphs with several peaks get more cuts, one round at a time.
"""

from __future__ import annotations

from remat.solvers.cuts import CutsAnswer, Effort, solve_cuts
from remat.solvers.evict import Taste
from remat.solvers.floor import PRICES, unit_price
from remat.solvers.keep import drop_all_but
from remat.solvers.run import Run
from remat.solvers.tape import Tape

SCREENED = 16
"""Ops of highest plain load whose relaxation is solved to find the best cut."""
ROUNDS = 8
MAX_NODES = 100
MAX_COLUMNS = 40_000
"""Larger programs take longer than the search that they would replace."""


def cut_at_tightest(run: Run, seed: int) -> list[int]:
    """Solve for one cut, at the op that bounds most, and offer what it keeps; returns the cuts for the next round."""
    cuts = _screen(run, run.tape())
    return _round(run, cuts, seed) if cuts else []


def add_cuts(run: Run, cuts: list[int], seed: int) -> None:
    """Cut again where the last schedule overflows, round by round, until the run is closed or no cut is left."""
    count = len(run.problem.graph.ops)
    # The other half of the time belongs to the search, which more cuts may not help.
    reserved_s = run.left_s() / 2
    for _ in range(ROUNDS):
        if not cuts or run.stop() or run.left_s() < reserved_s or 2 * len(cuts) * count > MAX_COLUMNS:
            return
        cuts = _round(run, cuts, seed)


def _round(run: Run, cuts: list[int], seed: int) -> list[int]:
    answer = _solve(run, cuts, seed)
    if answer.kept is None or run.closed():
        return []
    more = _build(run, cuts, answer.kept)
    return sorted({*cuts, *more}) if more else []


def _screen(run: Run, plain: Tape) -> list[int]:
    """The op whose cut has the largest relaxed bound."""
    best, best_bound = -1, -1.0
    for place in plain.load.argsort(kind="stable")[::-1][:SCREENED]:
        if run.stop():
            break
        bound = solve_cuts(plain.shape, [int(place)], run.budget, Effort(relaxed=True)).extra_time
        run.raise_bound(safe(bound), "relaxed cut")
        if bound > best_bound:
            best, best_bound = int(place), bound
    return [best] if best >= 0 else []


def _solve(run: Run, cuts: list[int], seed: int) -> CutsAnswer:
    # The gap of the program is relative to recomputation, the run's to the whole step: half of it is left to `build`.
    share = run.gap / 2 * run.base_time / max(run.bound_extra, 1e-9 * run.base_time, 1e-300)
    limit = min(max(0.01 * len(run.problem.graph.ops), 0.5), 4.0, run.left_s() / 2)
    effort = Effort(time_limit_s=limit, gap=min(max(share, 1e-6), 0.05), max_nodes=MAX_NODES, seed=seed)
    answer = solve_cuts(run.tape().shape, cuts, run.budget, effort)
    run.raise_bound(safe(answer.extra_time), f"{len(cuts)} cuts")
    return answer


def _build(run: Run, cuts: list[int], kept: tuple[frozenset[int], ...]) -> list[int]:
    """Build the schedule that keeps `kept` and offer it, repaired where needed; returns where to cut next."""
    tape = run.tape()
    drop_all_but(tape, kept, cuts)
    overflows = _overflows(tape, run.budget, cuts)
    steps = tape.extra_steps()
    for price in (0.0, *PRICES):
        if run.fit(run.tape(steps), Taste(price=price * unit_price(tape)), "cut program") and not overflows:
            break
    return overflows


def _overflows(tape: Tape, budget: int, cuts: list[int]) -> list[int]:
    """Stages outside `cuts` where the tape is over the budget: the worst, and the worst far from it."""
    count, load, keys = tape.shape.count, tape.load, tape.keys
    worst: list[int] = []
    for place in load.argsort(kind="stable")[::-1]:
        if load[place] <= budget or len(worst) == 2:
            break
        stage = int(keys[place]) // count
        if stage < count and stage not in cuts and all(abs(stage - other) > count // 20 for other in worst):
            worst.append(stage)
    return worst


def safe(extra_time: float) -> float:
    """A little less than the solver says, for its tolerances."""
    return extra_time * (1 - 1e-7)
