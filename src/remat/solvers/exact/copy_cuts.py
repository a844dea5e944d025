"""The cut program with values on the host: what is in memory at each cut, what is away, and what must run again.

To the program of `cuts` come, for cuts j_1 < … < j_K, A[k,v], that v is on the host and not in memory when j_k first
runs, and that its copy back is what comes next of it; B[k,v], that this copy begins in stretch k; O[k,v], that v was
copied out by j_k; and W[k], what ops wait in stretch k, in stretch 0 with all that runs again before the first cut:

    minimise  Σ W[k] + Σ time_i · R[k,i] + Σ (out_v · O[K,v] + Σ back_v · B[k,v]) for copies that ops wait for
    S[k,v] + B[k,v] + R[k,i] ≥ 1             and likewise wherever `cuts` has S[k,v] as a source
    B[k,v] ≤ A[k,v] ≤ B[k,v] + A[k+1,v]      without the last where stretch k reads v, or nobody does later
    A[k+1,v] ≤ S[k,v] + A[k,v] + R[k,i]      for a value v of op i, before j_k
    A[k,v] ≤ O[k,v] ≤ O[k+1,v]
    Σ out_v · O[k,v] ≤ P(j_k) - P(b) + extra(b, j_k)       over values born by op b or later, for copies beside ops
    Σ back_v · B[m,v] ≤ P(d) - P(j_k) + extra(j_k, d)      over m ≥ k and values that are read after j_m, and by d
    Σ bytes_v · A[k,v] ≤ what the host may hold

P(i) is the time of first runs before op i, and extra(a, b) that of W and R in the stretches from a to b. Every schedule
within the budget satisfies this. A copy out that is done by the cut has run between the first computation of its value
and the cut, and a copy back that begins in stretch m runs between j_m and its first reader, each on an engine that does
one at a time; all other time is W and R. A value that no first run after the cut reads is there for ops that run again,
and these for a first run at last: d is the latest that can come of it, as runs that serve nobody may be left out. So
the optimum bounds the extra time of every schedule with copies whose first runs are in the graph's order, and what is
away in it is worth copying. With a single cut B is A, and O too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
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
MOST_WINDOWS, LEAST_WINDOWS = 40, 8
"""Rows for each engine: windows that copies have to fit into, of one cut and of each of many."""


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
    """The program of this module's docstring; `away[k][v]` is the column of A[k,v], and so on."""

    def __init__(
        self, flat: FlatProblem, cuts: Sequence[int], budget: int, movable: Mapping[int, Movable], host_budget: int
    ) -> None:
        base = sum(flat.time)
        super().__init__(flat, Cuts(tuple(cuts)), budget, SCALE / base if base > 0 else 1.0)
        self.movable, self.host_budget = movable, host_budget
        self.away: list[dict[int, int]] = []
        self.backs: list[dict[int, int]] = []
        self.outs: list[dict[int, int]] = []
        self.starts = [0.0, *accumulate(flat.time)]
        self.base = max(base, 1e-300)
        # In units of the plain time: what waits longer than that is worse than anything.
        self.waits = [self.program.add_column(self.base * self.scale, integer=False) for _ in range(len(cuts) + 1)]
        self._is_anchor = False

    def build(self) -> bool:
        if not super().build():
            return False
        needs, unit = self._needs(), max(self.host_budget, 1)
        for index, away in enumerate(self.away):
            if index + 1 < len(self.cuts):
                self._add_stays(index, needs[index])
            self._add_windows_before(index)
            self._add_windows_after(index, needs)
            self.program.add_row([(column, self.flat.size[v] / unit) for v, column in away.items()], upper=1.0)
        self._price_waiting()
        return True

    def _add_columns(self, index: int) -> None:
        super()._add_columns(index)
        read_now = set(self.flat.inputs[self.cuts[index]])
        values = [value for value in self.held[index] if value in self.movable and value not in read_now]
        away = {value: self.program.add_column(0.0) for value in values}
        is_last = index + 1 == len(self.cuts)
        self.away.append(away)
        self.backs.append(away if is_last else {value: self.program.add_column(0.0) for value in values})
        self.outs.append(self._outs(away))

    def _outs(self, away: Mapping[int, int]) -> dict[int, int]:
        """What was copied out by a cut: what is away there, and what was copied out by the cut before."""
        if not self.outs:
            return dict(away)
        found = dict(self.outs[-1])
        for value, column in away.items():
            before = found.get(value)
            if before is None:
                found[value] = column
                continue
            found[value] = self.program.add_column(0.0, integer=False)
            for earlier in (before, column):
                self.program.add_row([(found[value], 1.0), (earlier, -1.0)], lower=0.0)
        return found

    def _sources(self, index: int, value: int, runs: Mapping[int, int]) -> Terms:
        found = super()._sources(index, value, runs)
        column = (self.away if self._is_anchor else self.backs)[index].get(value)
        return [*found, (column, 1.0)] if column is not None else found

    def _add_anchor(self, index: int) -> None:
        # What is away at an anchor comes back at some time after it.
        self._is_anchor = True
        super()._add_anchor(index)
        self._is_anchor = False

    def _add_stays(self, index: int, needs: Mapping[int, int]) -> None:
        """What is away stays so until the next cut or comes back; nothing is away there that was nowhere before."""
        backs, following = self.backs[index], self.away[index + 1]
        for value, column in self.away[index].items():
            self.program.add_row([(column, 1.0), (backs[value], -1.0)], lower=0.0)
            stays = value in following and needs.get(value, self.flat.count) > self.cuts[index + 1]
            later = [(following[value], 1.0)] if stays else []
            self.program.add_row([(backs[value], 1.0), (column, -1.0), *later], lower=0.0)
        for value, column in following.items():
            if value in self.held[index]:
                before = CutProgram._sources(self, index, value, self.again[index])
                before += [(self.away[index][value], 1.0)] if value in self.away[index] else []
                self.program.add_row([*before, (column, -1.0)], lower=0.0)

    def _extra(self, first: int, last: int) -> Terms:
        """Less the time, in stretches from `first` to `last`, that is no first run."""
        found = [(self.waits[stretch], -1.0) for stretch in range(first, last + 1)]
        for stretch in range(max(first, 1), last + 1):
            again = self.again[stretch - 1].items()
            found += [(column, -self.flat.time[number] / self.base) for number, column in again]
        return found

    def _add_windows_before(self, index: int) -> None:
        outs, cut = self.outs[index], self.cuts[index]
        births = {value: self.flat.producer[value] for value in outs if self.movable[value].is_beside}
        for birth in self._spread(births.values()):
            inside = [value for value, born in births.items() if born >= birth]
            terms = [(outs[value], self.movable[value].out_ns / self.base) for value in inside]
            window = self.starts[cut] - self.starts[birth + 1]
            extra = self._extra(bisect_right(self.cuts, birth), index)
            self.program.add_row([*terms, *extra], upper=window / self.base)

    def _add_windows_after(self, index: int, needs: Sequence[Mapping[int, int]]) -> None:
        cut, stages = self.cuts[index], range(index, len(self.cuts))
        for read in self._spread(read for stage in stages for read in needs[stage].values()):
            inside = [(stage, v) for stage in stages for v, at in needs[stage].items() if at <= read]
            terms = [(self.backs[stage][v], self.movable[v].back_ns / self.base) for stage, v in inside]
            window = self.starts[read] - self.starts[cut]
            extra = self._extra(index + 1, bisect_right(self.cuts, read - 1))
            self.program.add_row([*terms, *extra], upper=window / self.base)

    def _needs(self) -> list[dict[int, int]]:
        """For each cut and value that may be away at it, the op that is reached only if the value was back by then."""
        latest = latest_needs(self.flat)
        return [self._needs_after(cut, away, latest) for cut, away in zip(self.cuts, self.away, strict=True)]

    def _needs_after(self, cut: int, away: Mapping[int, int], latest: Sequence[int]) -> dict[int, int]:
        # What only ops read that never run again is of no use on the host, and comes back for nobody.
        wanted = {value for value in away if self.movable[value].is_beside and latest[value] > cut}
        found = {value: latest[value] for value in wanted}
        for number in range(self.flat.count - 1, cut - 1, -1):
            found |= {value: number for value in self.flat.inputs[number] if value in wanted}
        return found

    def _price_waiting(self) -> None:
        """Ops wait for copies that do not run beside them, and that is what these cost."""
        for value, column in self.outs[-1].items():
            if not self.movable[value].is_beside:
                self.program.cost[column] += self.movable[value].out_ns * self.scale
        for backs in self.backs:
            for value, column in backs.items():
                if not self.movable[value].is_beside:
                    self.program.cost[column] += self.movable[value].back_ns * self.scale

    def _spread(self, places: Iterable[int]) -> list[int]:
        """At most so many of them, evenly."""
        items, most = sorted(set(places)), max(LEAST_WINDOWS, MOST_WINDOWS // len(self.cuts))
        if len(items) <= most:
            return items
        return [items[place * (len(items) - 1) // (most - 1)] for place in range(most)]


def latest_needs(flat: FlatProblem) -> list[int]:
    """For each value, the last first run that needs it, be it for an op that runs again for that; -1 for none."""
    latest = [flat.count if value in flat.final else -1 for value in range(len(flat.size))]
    for number in range(flat.count - 1, -1, -1):
        again = max((latest[value] for value in flat.outputs[number]), default=-1) if flat.recomputable[number] else -1
        for value in flat.inputs[number]:
            latest[value] = max(latest[value], number, again)
    return latest


def away_program(problem: Problem, cuts: Sequence[int]) -> AwayProgram:
    """The program of a problem with copies, to be built."""
    flat = without_negligible(flatten(always_overwritten(without_copies(problem))), problem.budget_bytes)
    movable = {int(item.value): item for item in movable_of(problem)}
    return AwayProgram(flat, cuts, problem.budget_bytes, movable, problem.host_budget_bytes)


def bound_with_copies(problem: Problem, limits: Limits, stop: Callable[[], bool]) -> AwayAnswer:
    """The best bound of a few cuts, and what is away in it; see the module's docstring."""
    plain = always_overwritten(without_copies(problem))
    loads = simulate(plain, plain_schedule(plain.graph)).live_bytes

    def solved(cut: int, *, relaxed: bool) -> AwayAnswer:
        model = away_program(problem, (cut,))
        if not model.build():
            return AwayAnswer(float("inf"))
        answer = minimise(model.program, limits, relaxed=relaxed, stop=stop)
        extra = min(max(safe(answer.bound / model.scale), 0.0), model.base)
        if answer.point is None:
            return AwayAnswer(extra)
        away = frozenset(v for v, column in model.away[0].items() if answer.point[column] > 0.5)
        return AwayAnswer(extra, away, model.kept(0, answer.point), cut)

    cuts = sorted(range(len(loads)), key=lambda number: -loads[number])[:SCREENED_OPS]
    screened = {cut: solved(cut, relaxed=True).extra_time for cut in cuts if not stop()}
    if not screened or stop():
        return AwayAnswer(max(screened.values(), default=0.0))
    best = max(screened, key=lambda cut: screened[cut])
    found = solved(best, relaxed=False)
    return replace(found, extra_time=max(found.extra_time, screened[best]))
