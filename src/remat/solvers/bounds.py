"""Bounds and schedules from the cut program: choose where to cut, solve, build, and look again where it overflows.

In: a `Run`. Out: a bound on recomputation and schedules offered to the run. One cut at the tightest op is often within
a fraction of a percent; graphs with several peaks and tight budgets get more cuts and moments, one round at a time. The
bound holds for first runs in the graph's order and any order and number of other runs (`cuts` gives the argument).
"""

from __future__ import annotations

from dataclasses import replace

from remat.solvers.cuts import Cuts, CutsAnswer, Effort, solve_cuts
from remat.solvers.evict import PRICES, Taste, unit_price
from remat.solvers.keep import drop_all_but
from remat.solvers.run import Run
from remat.solvers.tape import Shape, Tape

SCREENED = 16
"""Ops of highest plain load whose relaxation is solved to find the best cut."""
ADDED = 4
"""Overflows that a round adds to the program."""
FIRST_SLICE_S = 4.0
"""What one program may take before the search has its turn; grows where that was too little."""
CRUMBS = 1e-4
"""The share of the budget that values may take together and still be left out of the program."""
EXACT = 1e-6
SMALL_COLUMNS = 2_000
"""Programs up to this size are solved to the end, whatever gap was asked for: it takes no longer."""
MAX_COLUMNS = 60_000
"""Larger programs take longer than the search that they would replace."""


class Refinement:
    """The cut program of a run, which grows where the schedule built from its solution is over the budget."""

    def __init__(self, run: Run, seed: int) -> None:
        self._run, self._seed = run, seed
        self._slice_s = FIRST_SLICE_S
        self._shape = without_crumbs(run.tape().shape, run.budget)
        self._cuts: Cuts | None = _screen(run, self._shape)

    @property
    def exhausted(self) -> bool:
        """Is there nothing left to add, or is the program too large to be worth it?"""
        return self._cuts is None or self._run.stop()

    def advance(self) -> None:
        """Solve once, raise the bound, offer schedules, and grow."""
        run, cuts = self._run, self._cuts
        if cuts is None or run.stop():
            return
        answer = self._solve(cuts)
        overflows = [] if answer.kept is None else _build(run, cuts, answer.kept)
        grown = _grow(cuts, len(run.problem.graph.ops), overflows)
        if grown == cuts and answer.complete:
            self._cuts = None
        elif grown == cuts:
            # The program is right where it matters, it only needs more time.
            self._slice_s *= 4
        elif self._columns(grown) > MAX_COLUMNS:
            self._cuts = None
        else:
            self._slice_s *= 1.0 if answer.complete else 1.5
            self._cuts = grown

    def _columns(self, cuts: Cuts) -> int:
        return 2 * len(cuts.ops) * len(self._run.problem.graph.ops)

    def _solve(self, cuts: Cuts) -> CutsAnswer:
        run = self._run
        # The program's gap is relative to recomputation, the run's to the whole step: half of it is left to `_build`.
        share = run.gap / 2 * run.base_time / max(run.bound_extra, 1e-9 * run.base_time, 1e-300)
        gap = EXACT if self._columns(cuts) <= SMALL_COLUMNS else min(max(share, EXACT), 0.05)
        effort = Effort(time_limit_s=min(self._slice_s, run.left_s()), gap=gap, seed=self._seed, stop=run.stop)
        answer = solve_cuts(self._shape, cuts, run.budget, effort)
        run.raise_bound(safe(answer.extra_time), f"{len(cuts.ops)} cuts")
        return answer


def without_crumbs(shape: Shape, budget: int) -> Shape:
    """The same with the smallest values, a negligible share of the budget together, taken to need no memory.

    Half of the values of a captured graph are statistics and counters; without them programs are that much smaller. The
    bound stays valid, because memory that is not counted only makes room.
    """
    total, smallest_kept = 0, 0
    for size in sorted(shape.size):
        total, smallest_kept = total + size, size
        if total > CRUMBS * budget:
            break
    return replace(shape, size=tuple(0 if size < smallest_kept else size for size in shape.size))


def _screen(run: Run, shape: Shape) -> Cuts | None:
    """The op whose cut has the largest relaxed bound."""
    plain = run.tape()
    best, best_bound = -1, -1.0
    for place in plain.load.argsort(kind="stable")[::-1][:SCREENED]:
        if run.stop():
            break
        effort = Effort(relaxed=True, time_limit_s=run.left_s(), stop=run.stop)
        bound = solve_cuts(shape, Cuts((int(place),)), run.budget, effort).extra_time
        run.raise_bound(safe(bound), "relaxed cut")
        if bound > best_bound:
            best, best_bound = int(place), bound
    return Cuts((best,)) if best >= 0 else None


def _build(run: Run, cuts: Cuts, kept: tuple[frozenset[int], ...]) -> list[int]:
    """Build the schedule that keeps `kept` and offer it, repaired where needed; returns the steps that overflow."""
    tape = run.tape()
    drop_all_but(tape, kept, cuts.ops)
    overflows = _overflows(tape, run.budget)
    steps = tape.extra_steps()
    for price in (0.0, *PRICES):
        if run.fit(run.tape(steps), Taste(price=price * unit_price(tape)), "cut program") and not overflows:
            break
    return overflows


def _overflows(tape: Tape, budget: int) -> list[int]:
    """The keys of the worst steps of the stretches over the budget, worst first."""
    load, worst, open_ = tape.load, [], False
    for place, over in enumerate(load > budget):
        if over and not open_:
            worst.append(place)
        elif over and load[place] > load[worst[-1]]:
            worst[-1] = place
        open_ = bool(over)
    return [int(tape.keys[place]) for place in sorted(worst, key=lambda place: -int(load[place]))]


def _grow(cuts: Cuts, count: int, overflows: list[int]) -> Cuts:
    """More cuts and moments where the schedule overflows; the same where none is new."""
    ops, moments = set(cuts.ops), set(cuts.moments)
    for key in overflows:
        stage, number = divmod(key, count)
        if stage == number:
            ops.add(stage)
        elif stage < count:
            ops |= {stage - 1, stage}
            moments.add((stage, number))
        if len(ops) + len(moments) >= len(cuts.ops) + len(cuts.moments) + ADDED:
            break
    return Cuts(tuple(sorted(ops)), frozenset(moments))


def safe(extra_time: float) -> float:
    """A little less than the solver says, for its tolerances."""
    return extra_time * (1 - 1e-7)
