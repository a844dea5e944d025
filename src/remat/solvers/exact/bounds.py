"""Bounds and schedules from the cut program: choose where to cut, solve, build, and look again where it overflows.

In: an incumbent. Out: a bound on recomputation and schedules offered to it. One cut at the tightest op is often within
a fraction of a percent; graphs with several peaks and tight budgets get more cuts and moments, one round at a time. The
bound holds for first runs in the graph's order and any order and number of other runs (`cuts` gives the argument).
"""

from __future__ import annotations

from dataclasses import replace

from remat.core.search.limits import Limits
from remat.solvers.exact.cuts import Cuts, CutsAnswer, solve_cuts
from remat.solvers.schedule.editable import EditableSchedule, FlatProblem
from remat.solvers.schedule.evict import PRICES, EvictionRule, unit_price
from remat.solvers.schedule.keep import drop_all_but
from remat.solvers.search.incumbent import ScheduleIncumbent

SCREENED_OPS = 16
"""Ops of highest plain load whose relaxation is solved to find the best cut."""
ADDED_OVERFLOWS = 4
"""Overflows that a round adds to the program."""
FIRST_SLICE_S = 4.0
"""What one program may take before the search has its turn; grows where that was too little."""
NEGLIGIBLE_SHARE = 1e-4
"""The share of the budget that values may take together and still be left out of the program."""
SMALL_PROGRAM_GAP = 1e-6
SMALL_COLUMNS = 2_000
"""Programs up to this size are solved to the end, whatever gap was asked for: it takes no longer."""
MAX_COLUMNS = 60_000
"""Larger programs take longer than the search that they would replace."""


class Refinement:
    """The cut program of a problem, which grows where the schedule built from its solution is over the budget."""

    def __init__(self, incumbent: ScheduleIncumbent) -> None:
        self._incumbent = incumbent
        self._slice_s = FIRST_SLICE_S
        self._flat = without_negligible(incumbent.editable().flat, incumbent.budget)
        self._cuts: Cuts | None = _screen(incumbent, self._flat)

    @property
    def exhausted(self) -> bool:
        """Is there nothing left to add, or is the program too large to be worth it?"""
        return self._cuts is None or self._incumbent.stop()

    def advance(self) -> None:
        """Solve once, raise the bound, offer schedules, and grow."""
        incumbent, cuts = self._incumbent, self._cuts
        if cuts is None or incumbent.stop():
            return
        answer = self._solve(cuts)
        overflows = [] if answer.kept is None else _build(incumbent, cuts, answer.kept)
        grown = grow(cuts, len(incumbent.problem.graph.ops), overflows)
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
        return 2 * len(cuts.ops) * len(self._incumbent.problem.graph.ops)

    def _solve(self, cuts: Cuts) -> CutsAnswer:
        incumbent = self._incumbent
        # The program's gap is relative to recomputation, the limits' to the whole step: half of it is left to `_build`.
        base_time = incumbent.base_time
        share = incumbent.limits.gap / 2 * base_time / max(incumbent.bound, 1e-9 * base_time, 1e-300)
        gap = SMALL_PROGRAM_GAP if self._columns(cuts) <= SMALL_COLUMNS else min(max(share, SMALL_PROGRAM_GAP), 0.05)
        limits = Limits(min(self._slice_s, incumbent.left_s()), gap=gap, seed=incumbent.limits.seed)
        answer = solve_cuts(self._flat, cuts, incumbent.budget, limits, stop=incumbent.stop)
        incumbent.raise_bound(safe(answer.extra_time), f"{len(cuts.ops)} cuts")
        return answer


def without_negligible(flat: FlatProblem, budget: int) -> FlatProblem:
    """The same with the smallest values, a negligible share of the budget together, taken to need no memory.

    Half of the values of a captured graph are statistics and counters; without them programs are that much smaller. The
    bound stays valid, because memory that is not counted only makes room.
    """
    total, smallest_kept = 0, 0
    for size in sorted(flat.size):
        total, smallest_kept = total + size, size
        if total > NEGLIGIBLE_SHARE * budget:
            break
    return replace(flat, size=tuple(0 if size < smallest_kept else size for size in flat.size))


def _screen(incumbent: ScheduleIncumbent, flat: FlatProblem) -> Cuts | None:
    """The op whose cut has the largest relaxed bound; None where even one cut makes too large a program."""
    if 2 * flat.count > MAX_COLUMNS:
        return None
    plain = incumbent.editable()
    best, best_bound = -1, -1.0
    for place in plain.load.argsort(kind="stable")[::-1][:SCREENED_OPS]:
        if incumbent.stop():
            break
        cut, limits = Cuts((int(place),)), Limits(incumbent.left_s())
        bound = solve_cuts(flat, cut, incumbent.budget, limits, relaxed=True, stop=incumbent.stop).extra_time
        incumbent.raise_bound(safe(bound), "relaxed cut")
        if bound > best_bound:
            best, best_bound = int(place), bound
    return Cuts((best,)) if best >= 0 else None


def _build(incumbent: ScheduleIncumbent, cuts: Cuts, kept: tuple[frozenset[int], ...]) -> list[int]:
    """Build the schedule that keeps `kept` and offer it, repaired where needed; returns the steps that overflow."""
    editable = incumbent.editable()
    drop_all_but(editable, kept, cuts.ops)
    overflows = find_overflows(editable, incumbent.budget)
    steps = editable.extra_steps()
    for price in (0.0, *PRICES):
        rule = EvictionRule(price=price * unit_price(editable))
        if incumbent.fit(incumbent.editable(steps), rule, "cut program") and not overflows:
            break
    return overflows


def find_overflows(editable: EditableSchedule, budget: int) -> list[int]:
    """The keys of the worst steps of the stretches over the budget, worst first."""
    load, worst, open_ = editable.load, [], False
    for place, over in enumerate(load > budget):
        if over and not open_:
            worst.append(place)
        elif over and load[place] > load[worst[-1]]:
            worst[-1] = place
        open_ = bool(over)
    return [int(editable.keys[place]) for place in sorted(worst, key=lambda place: -int(load[place]))]


def grow(cuts: Cuts, count: int, overflows: list[int]) -> Cuts:
    """More cuts and moments where the schedule overflows; the same where none is new."""
    ops, moments = set(cuts.ops), set(cuts.moments)
    for key in overflows:
        stage, number = divmod(key, count)
        if stage == number:
            ops.add(stage)
        elif stage < count:
            ops |= {stage - 1, stage}
            moments.add((stage, number))
        if len(ops) + len(moments) >= len(cuts.ops) + len(cuts.moments) + ADDED_OVERFLOWS:
            break
    return Cuts(tuple(sorted(ops)), frozenset(moments))


def safe(extra_time: float) -> float:
    """A little less than the solver says, for its tolerances."""
    return extra_time * (1 - 1e-7)
