"""Cut the step at a few ops: what is in memory at each cut, and what must run again between them (coarse Checkmate).

Cuts are ops j_1 < … < j_K; stretch k runs from the first run of j_k to that of j_{k+1}. For values v computed before
j_k, S[k,v] says that v is in memory when j_k first runs, and R[k,i] that op i runs again in stretch k:

    minimise  Σ time_i · R[k,i]
    S[k,v] + R[k,i] ≥ 1              for a value v of op i that an op of stretch k reads (or, at the end, an output)
    S[k,a] + R[k,p] ≥ R[k,i]         for an input a of i, p being a's op
    S[k+1,v] ≤ S[k,v] + R[k,i]       for a value v of op i
    S[k,v] = 1                       for an input v of j_k
    Σ bytes_v · S[k,v] ≤ budget - what j_k itself adds

A moment (k, i) bounds memory when op i first runs again in stretch k, where its inputs and outputs are in memory and so
is every other value that L[v] stands for:

    L[v] ≥ S[k+1,v] - R[k,p]             v is held at both ends of the stretch and not computed in it
    L[v] ≥ R[k,u] - R[k,p] - S[k,o]      v is not computed in it, and read by u after what i computes, o, is there
    bytes_i · R[k,i] + Σ bytes_v · L[v] ≤ budget

The relaxation of several cuts is weaker than that of one, so the program of a single cut is added as rows on Y[i], that
i runs again at any time after an anchor k: Y[i] ≤ Σ R[m,i] over m ≥ k, with the rows above for S[k] and Y.

Every schedule within the budget whose first runs are in the graph's order satisfies all this, whatever the order and
number of its other runs, so the optimum bounds recomputation from below; cuts at separate peaks add up. A solution says
what to keep at each cut, which `keep` turns into a schedule.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from remat.core.search.limits import Limits
from remat.solvers.backends.linear_highs import MixedIntegerProgram, minimise
from remat.solvers.schedule.editable import FlatProblem

Terms = list[tuple[int, float]]
"""Columns and their factors."""
SCALE = 1e4
"""The plain step's time in the units of the program, so that absolute tolerances stay far below any op."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where to look at memory: first runs of `ops`, in increasing order, and later runs in between."""

    ops: tuple[int, ...]
    moments: frozenset[tuple[int, int]] = frozenset()
    """(stage, op): the op runs again in the stretch that ends with the first run of `stage`."""


@dataclass(frozen=True, slots=True)
class CutsAnswer:
    extra_time: float
    """Recomputation that every schedule within the budget pays at least; infinite when there is none."""
    kept: tuple[frozenset[int], ...] | None
    """The values in memory at each cut in the best point found."""
    complete: bool = True
    """Solved to the gap that was asked for."""


def solve_cuts(
    flat: FlatProblem,
    cuts: Cuts,
    budget: int,
    limits: Limits,
    *,
    relaxed: bool = False,
    stop: Callable[[], bool] | None = None,
) -> CutsAnswer:
    """Solve the program of this module's docstring; its relaxation is quick and gives a bound only."""
    base = sum(flat.time)
    scale = SCALE / base if base > 0 else 1.0
    model = CutProgram(flat, cuts, budget, scale)
    if not model.build():
        return CutsAnswer(float("inf"), None)
    answer = minimise(model.program, limits, relaxed=relaxed, stop=stop)
    kept = None
    if answer.point is not None and not relaxed:
        kept = tuple(model.kept(index, answer.point) for index in range(len(cuts.ops)))
    return CutsAnswer(max(answer.bound / scale, 0.0), kept, answer.complete)


class CutProgram:
    """The program and which column stands for what: `held[k][v]` for S[k,v], `again[k][i]` for R[k,i]."""

    def __init__(self, flat: FlatProblem, cuts: Cuts, budget: int, scale: float) -> None:
        self.flat, self.cuts, self.budget, self.scale = flat, cuts.ops, budget, scale
        self.moments = sorted(cuts.moments)
        self.program = MixedIntegerProgram()
        self.held: list[dict[int, int]] = []
        self.again: list[dict[int, int]] = []
        self.readers = _readers(flat)

    def build(self) -> bool:
        """Fill the program; False where a cut's own op does not fit."""
        for index in range(len(self.cuts)):
            self._add_columns(index)
            self._add_needs(index)
            if index:
                self._add_handover(index)
            if not self._add_capacity(index):
                return False
        if len(self.cuts) > 1:
            for index in sorted({0, len(self.cuts) // 2}):
                self._add_anchor(index)
        for stage, number in self.moments:
            index = bisect_left(self.cuts, stage) - 1
            if index >= 0 and number in self.again[index]:
                self._add_moment(index, number)
        return True

    def kept(self, index: int, point: tuple[float, ...]) -> frozenset[int]:
        """What the solution keeps at a cut, and every value without bytes; others in no column are not needed again."""
        held = self.held[index]
        return frozenset(v for v, size in enumerate(self.flat.size) if not size or (v in held and point[held[v]] > 0.5))

    def _add_columns(self, index: int) -> None:
        flat, cut = self.flat, self.cuts[index]
        read_now = set(flat.inputs[cut])
        ops = sorted(_needed_ops(flat, cut))
        self.again.append({i: self.program.add_column(flat.time[i] * self.scale) for i in ops if flat.recomputable[i]})
        self.held.append(
            {
                value: self.program.add_column(0.0, lower=1.0 if value in read_now else 0.0)
                for i in ops
                for value in flat.outputs[i]
                if flat.size[value]
            }
        )

    def _add_needs(self, index: int) -> None:
        last = index + 1 == len(self.cuts)
        end = self.flat.count if last else self.cuts[index + 1]
        read = self._read_from(self.cuts[index] + 1, end)
        self._add_reads(index, read | self.flat.final if last else read, self.again[index])

    def _add_reads(self, index: int, read: Collection[int], runs: Mapping[int, int]) -> None:
        """What is read after a cut is held there or computed by `runs`, and so are the inputs of those."""
        held = self.held[index]
        for value in sorted(held.keys() & read):
            self.program.add_row(self._sources(index, value, runs), lower=1.0)
        for number, column in runs.items():
            for value in self.flat.inputs[number]:
                if value in held:
                    self.program.add_row([*self._sources(index, value, runs), (column, -1.0)], lower=0.0)

    def _read_from(self, start: int, end: int) -> set[int]:
        return {value for number in range(start, end) for value in self.flat.inputs[number]}

    def _add_handover(self, index: int) -> None:
        before, runs = self.held[index - 1], self.again[index - 1]
        for value, column in self.held[index].items():
            if value in before:
                self.program.add_row([*self._sources(index - 1, value, runs), (column, -1.0)], lower=0.0)

    def _add_capacity(self, index: int) -> bool:
        flat, cut = self.flat, self.cuts[index]
        room = self.budget - flat.resident - flat.workspace[cut] - flat.output_bytes[cut]
        terms = [(column, flat.size[value] / max(self.budget, 1)) for value, column in self.held[index].items()]
        self.program.add_row(terms, upper=room / max(self.budget, 1))
        return room >= 0

    def _add_anchor(self, index: int) -> None:
        ever = {number: self.program.add_column(0.0, integer=False) for number in self.again[index]}
        for number, column in ever.items():
            runs = [(again[number], 1.0) for again in self.again[index:] if number in again]
            self.program.add_row([*runs, (column, -1.0)], lower=0.0)
        read = self._read_from(self.cuts[index] + 1, self.flat.count)
        self._add_reads(index, read | self.flat.final, ever)

    def _add_moment(self, index: int, number: int) -> None:
        flat, unit = self.flat, max(self.budget, 1)
        own = flat.output_bytes[number] + flat.workspace[number]
        own += sum(flat.size[value] for value in flat.inputs[number])
        terms = [(self.again[index][number], own / unit)]
        for value in self.held[index]:
            if value not in flat.inputs[number] and flat.producer[value] != number:
                reasons = self._reasons(index, value, number)
                if reasons:
                    terms.append((self._live(index, value, reasons), flat.size[value] / unit))
        self.program.add_row(terms, upper=(self.budget - flat.resident) / unit)

    def _reasons(self, index: int, value: int, number: int) -> list[tuple[Terms, float]]:
        """Rows, less L[v] and R[k,p], and their lower ends that make `value` be there when `number` runs again."""
        held, again = self.held[index], self.again[index]
        last = index + 1 == len(self.cuts)
        end = self.flat.count if last else self.cuts[index + 1]
        reasons: list[tuple[Terms, float]] = []
        if last and value in self.flat.final:
            reasons.append(([], 1.0))
        if not last and value in self.held[index + 1]:
            reasons.append(([(self.held[index + 1][value], -1.0)], 0.0))
        for made in self.flat.outputs[number]:
            for reader in self.readers[value] & self.readers[made] if made in held else ():
                if reader in again:
                    reasons.append(([(again[reader], -1.0), (held[made], 1.0)], 0.0))
                elif self.cuts[index] < reader < end:
                    reasons.append(([(held[made], 1.0)], 1.0))
        return reasons

    def _live(self, index: int, value: int, reasons: list[tuple[Terms, float]]) -> int:
        live = self.program.add_column(0.0, integer=False)
        computed = self.again[index].get(self.flat.producer[value])
        own = [(live, 1.0)] if computed is None else [(live, 1.0), (computed, 1.0)]
        for terms, lower in reasons:
            self.program.add_row(own + terms, lower=lower)
        return live

    def _sources(self, index: int, value: int, runs: Mapping[int, int]) -> Terms:
        """Where a reader after a cut may find `value`: held from the cut, or computed again."""
        column = runs.get(self.flat.producer[value])
        return [(self.held[index][value], 1.0)] + ([(column, 1.0)] if column is not None else [])


def _readers(flat: FlatProblem) -> list[set[int]]:
    readers: list[set[int]] = [set() for _ in flat.size]
    for number, inputs in enumerate(flat.inputs):
        for value in inputs:
            readers[value].add(number)
    return readers


def _needed_ops(flat: FlatProblem, cut: int) -> set[int]:
    """Ops before `cut` that may have to run again because something from `cut` on reads their values."""
    values = {value for number in range(cut, flat.count) for value in flat.inputs[number]} | flat.final
    found: set[int] = set()
    stack = [flat.producer[value] for value in values]
    while stack:
        number = stack.pop()
        if number < cut and number not in found:
            found.add(number)
            stack += [flat.producer[value] for value in flat.inputs[number]]
    return found
