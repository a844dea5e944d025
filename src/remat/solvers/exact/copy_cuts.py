"""The cut program with values on the host: what is in memory at one cut, what is away, and what must run again.

To the program of `cuts`, for a single cut j, come A[v], that v is on the host and not in memory when j first runs, and
W and W', the extra time before the cut and what ops wait after it:

    minimise  W + Σ time_i · R[i] + W' + Σ (out_v + back_v) · A[v] for copies that ops wait for
    S[v] + A[v] + R[i] ≥ 1                   and likewise wherever `cuts` has S[v] as a source
    Σ out_v · A[v] ≤ P(j) - P(b) + W         over values born by op b or later, for copies beside ops
    Σ back_v · A[v] ≤ P(d) - P(j) + Σ time_i · R[i] + W'   over values that are read after j, and by d
    Σ bytes_v · A[v] ≤ what the host may hold

P(i) is the time of first runs before op i. Every schedule within the budget satisfies this: v counts as away where its
copy comes back before v is computed again, if it ever is. Then its copy out has run between its first computation and
the cut, and its copy back runs between the cut and its first reader, each on an engine that does one at a time; all
time before the cut that is no first run is W, and all after it R and W'. A value that no first run after the cut reads
is there for ops that run again, and these for a first run at last: d is the latest that can come of it, as runs that
serve nobody may be left out. So the optimum bounds the extra time of every schedule with copies whose first runs are in
the graph's order, and what is away in it is worth copying.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from remat.core.copies import Movable, movable_of, without_copies
from remat.core.problem import Problem
from remat.core.schedule import plain_schedule
from remat.core.search.limits import Limits
from remat.core.simulate import simulate
from remat.solvers.backends.linear_highs import minimise
from remat.solvers.exact.bounds import safe, without_negligible
from remat.solvers.exact.cuts import SCALE, CutProgram, Cuts, Terms
from remat.solvers.schedule.editable import FlatProblem, flatten
from remat.solvers.schedule.overwrite import always_overwritten

SCREENED_OPS = 6
"""Ops of highest plain load whose relaxation is solved to find the best cut."""
MOST_WINDOWS = 40
"""Rows for each engine: windows that copies have to fit into."""


@dataclass(frozen=True, slots=True)
class AwayAnswer:
    extra_time: float
    """What every schedule with copies within the budget takes beyond the plain time, at least."""
    away: frozenset[int] = frozenset()
    """The values on the host at the cut, in the best point found."""
    kept: frozenset[int] = frozenset()
    """Those in memory there."""
    cut: int = -1
    """The op; -1 where no point was found."""


class AwayProgram(CutProgram):
    """The program of this module's docstring; `away[v]` is the column of A[v]."""

    def __init__(
        self, flat: FlatProblem, cut: int, budget: int, movable: Mapping[int, Movable], host_budget: int
    ) -> None:
        base = sum(flat.time)
        super().__init__(flat, Cuts((cut,)), budget, SCALE / base if base > 0 else 1.0)
        self.cut, self.movable, self.host_budget = cut, movable, host_budget
        self.away: dict[int, int] = {}
        self.starts = [0.0, *accumulate(flat.time)]
        self.base = max(base, 1e-300)

    def build(self) -> bool:
        if not super().build():
            return False
        # In units of the plain time: what waits longer than that is worse than anything.
        before, after = (self.program.add_column(self.base * self.scale, integer=False) for _ in range(2))
        self._add_windows_before(before)
        self._add_windows_after(after)
        unit = max(self.host_budget, 1)
        self.program.add_row([(column, self.flat.size[v] / unit) for v, column in self.away.items()], upper=1.0)
        return True

    def _add_columns(self, index: int) -> None:
        super()._add_columns(index)
        read_now = set(self.flat.inputs[self.cut])
        for value in self.held[index]:
            item = self.movable.get(value)
            if item is not None and value not in read_now:
                waited = 0.0 if item.is_beside else item.out_ns + item.back_ns
                self.away[value] = self.program.add_column(waited * self.scale)

    def _sources(self, index: int, value: int, runs: Mapping[int, int]) -> Terms:
        found = super()._sources(index, value, runs)
        return [*found, (self.away[value], 1.0)] if value in self.away else found

    def _beside(self) -> list[int]:
        return [value for value in self.away if self.movable[value].is_beside]

    def _add_windows_before(self, wait: int) -> None:
        births = {value: self.flat.producer[value] for value in self._beside()}
        for birth in _spread(sorted(set(births.values()))):
            inside = [value for value, born in births.items() if born >= birth]
            terms = [(self.away[value], self.movable[value].out_ns / self.base) for value in inside]
            window = self.starts[self.cut] - self.starts[birth + 1]
            self.program.add_row([*terms, (wait, -1.0)], upper=window / self.base)

    def _add_windows_after(self, wait: int) -> None:
        again = [(column, -self.flat.time[i] / self.base) for i, column in self.again[0].items()]
        reads = self._first_reads()
        for read in _spread(sorted(set(reads.values()))):
            inside = [value for value, at in reads.items() if at <= read]
            terms = [(self.away[value], self.movable[value].back_ns / self.base) for value in inside]
            window = self.starts[read] - self.starts[self.cut]
            self.program.add_row([*terms, *again, (wait, -1.0)], upper=window / self.base)

    def _first_reads(self) -> dict[int, int]:
        """For each value that may be away, the op that is reached after the cut only if the value was back by then."""
        wanted, found = set(self._beside()), dict[int, int]()
        for number in range(self.cut, self.flat.count):
            for value in self.flat.inputs[number]:
                if value in wanted:
                    found.setdefault(value, number)
        latest = latest_needs(self.flat)
        # What only ops read that never run again is of no use on the host, and comes back for nobody.
        return {value: found.get(value, latest[value]) for value in wanted if latest[value] > self.cut}


def latest_needs(flat: FlatProblem) -> list[int]:
    """For each value, the last first run that needs it, be it for an op that runs again for that; -1 for none."""
    latest = [flat.count if value in flat.final else -1 for value in range(len(flat.size))]
    for number in range(flat.count - 1, -1, -1):
        again = max((latest[value] for value in flat.outputs[number]), default=-1) if flat.recomputable[number] else -1
        for value in flat.inputs[number]:
            latest[value] = max(latest[value], number, again)
    return latest


def _spread(items: list[int]) -> list[int]:
    """At most so many of them, evenly."""
    if len(items) <= MOST_WINDOWS:
        return items
    return [items[place * (len(items) - 1) // (MOST_WINDOWS - 1)] for place in range(MOST_WINDOWS)]


def bound_with_copies(problem: Problem, limits: Limits, stop: Callable[[], bool]) -> AwayAnswer:
    """The best bound of a few cuts, and what is away in it; see the module's docstring."""
    plain = always_overwritten(without_copies(problem))
    flat = without_negligible(flatten(plain), problem.budget_bytes)
    loads = simulate(plain, plain_schedule(plain.graph)).live_bytes
    movable = {int(item.value): item for item in movable_of(problem)}

    def solved(cut: int, *, relaxed: bool) -> AwayAnswer:
        model = AwayProgram(flat, cut, problem.budget_bytes, movable, problem.host_budget_bytes)
        if not model.build():
            return AwayAnswer(float("inf"))
        answer = minimise(model.program, limits, relaxed=relaxed, stop=stop)
        extra = min(max(safe(answer.bound / model.scale), 0.0), model.base)
        if answer.point is None:
            return AwayAnswer(extra)
        away = frozenset(v for v, column in model.away.items() if answer.point[column] > 0.5)
        return AwayAnswer(extra, away, model.kept(0, answer.point), cut)

    cuts = sorted(range(flat.count), key=lambda number: -loads[number])[:SCREENED_OPS]
    screened = {cut: solved(cut, relaxed=True).extra_time for cut in cuts if not stop()}
    if not screened or stop():
        return AwayAnswer(max(screened.values(), default=0.0))
    best = max(screened, key=lambda cut: screened[cut])
    found = solved(best, relaxed=False)
    return replace(found, extra_time=max(found.extra_time, screened[best]))
