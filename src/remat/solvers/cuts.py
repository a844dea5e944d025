"""Cut the step at a few ops: what is in memory at each cut, and what must run again between them (coarse Checkmate).

Cuts are ops j_1 < … < j_K; stretch k runs from the first run of j_k to that of j_{k+1}. For values v computed before
j_k, S[k,v] says that v is in memory when j_k first runs, and R[k,i] that op i runs again in stretch k:

    minimise  Σ time_i · R[k,i]
    S[k,v] + R[k,i] ≥ 1              for a value v of op i that an op of stretch k reads (or, at the end, an output)
    S[k,a] + R[k,p] ≥ R[k,i]         for an input a of i, p being a's op
    S[k+1,v] ≤ S[k,v] + R[k,i]       for a value v of op i
    S[k,v] = 1                       for an input v of j_k
    Σ bytes_v · S[k,v] ≤ budget - what j_k itself adds

Every schedule within the budget satisfies this, so the optimum bounds recomputation from below; cuts at separate peaks
add up. A solution says what to keep at each cut, which `keep` turns into a schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remat.solvers.highs import Program, minimise
from remat.solvers.tape import Shape

_SCALE = 1e4
"""The plain step's time in the units of the program, so that absolute tolerances stay far below any op."""


@dataclass(frozen=True, slots=True)
class CutsAnswer:
    extra_time: float
    """Recomputation that every schedule within the budget pays at least; infinite when there is none."""
    kept: tuple[frozenset[int], ...] | None
    """The values in memory at each cut in the best point found."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard to try; the relaxation is quick and gives a bound only."""

    relaxed: bool = False
    time_limit_s: float = 2.0
    gap: float = 1e-3
    max_nodes: int = 1000
    seed: int = 0


def solve_cuts(shape: Shape, cuts: Sequence[int], budget: int, effort: Effort) -> CutsAnswer:
    """Solve the program of this module's docstring; `cuts` are ops in increasing order."""
    base = sum(shape.time)
    scale = _SCALE / base if base > 0 else 1.0
    model = _Model(shape, tuple(cuts), budget, scale)
    if not model.build():
        return CutsAnswer(float("inf"), None)
    answer = minimise(
        model.program,
        relaxed=effort.relaxed,
        time_limit_s=effort.time_limit_s,
        gap=effort.gap,
        max_nodes=effort.max_nodes,
        seed=effort.seed,
    )
    kept = None
    if answer.point is not None and not effort.relaxed:
        kept = tuple(model.kept(index, answer.point) for index in range(len(cuts)))
    return CutsAnswer(max(answer.bound / scale, 0.0), kept)


class _Model:
    """The program and which column stands for what: `held[k][v]` for S[k,v], `again[k][i]` for R[k,i]."""

    def __init__(self, shape: Shape, cuts: tuple[int, ...], budget: int, scale: float) -> None:
        self.shape, self.cuts, self.budget, self.scale = shape, cuts, budget, scale
        self.program = Program()
        self.held: list[dict[int, int]] = []
        self.again: list[dict[int, int]] = []

    def build(self) -> bool:
        """Fill the program; False where a cut's own op does not fit."""
        for index in range(len(self.cuts)):
            self._add_columns(index)
            self._add_needs(index)
            if index:
                self._add_handover(index)
            if not self._add_capacity(index):
                return False
        return True

    def kept(self, index: int, point: tuple[float, ...]) -> frozenset[int]:
        """What the solution keeps at a cut: values outside the program have no bytes or are not needed again."""
        held = self.held[index]
        return frozenset(v for v in range(len(self.shape.size)) if v not in held or point[held[v]] > 0.5)

    def _add_columns(self, index: int) -> None:
        shape, cut = self.shape, self.cuts[index]
        read_now = set(shape.inputs[cut])
        ops = sorted(_needed_ops(shape, cut))
        self.again.append(
            {i: self.program.add_column(shape.time[i] * self.scale) for i in ops if shape.recomputable[i]}
        )
        self.held.append(
            {
                value: self.program.add_column(0.0, lower=1.0 if value in read_now else 0.0)
                for i in ops
                for value in shape.outputs[i]
                if shape.size[value]
            }
        )

    def _add_needs(self, index: int) -> None:
        shape, held, again = self.shape, self.held[index], self.again[index]
        last = index + 1 == len(self.cuts)
        end = shape.count if last else self.cuts[index + 1]
        read = {value for number in range(self.cuts[index] + 1, end) for value in shape.inputs[number]}
        for value in sorted(read | shape.final if last else read):
            if value in held:
                self.program.add_row(self._sources(index, value), lower=1.0)
        for number, column in again.items():
            for value in shape.inputs[number]:
                if value in held:
                    self.program.add_row([*self._sources(index, value), (column, -1.0)], lower=0.0)

    def _add_handover(self, index: int) -> None:
        for value, column in self.held[index].items():
            if value in self.held[index - 1]:
                self.program.add_row([*self._sources(index - 1, value), (column, -1.0)], lower=0.0)

    def _add_capacity(self, index: int) -> bool:
        shape, cut = self.shape, self.cuts[index]
        room = self.budget - shape.resident - shape.workspace[cut] - shape.output_bytes[cut]
        terms = [(column, shape.size[value] / max(self.budget, 1)) for value, column in self.held[index].items()]
        self.program.add_row(terms, upper=room / max(self.budget, 1))
        return room >= 0

    def _sources(self, index: int, value: int) -> list[tuple[int, float]]:
        """Where a reader in stretch `index` may find `value`: held from the cut, or computed again."""
        column = self.again[index].get(self.shape.producer[value])
        return [(self.held[index][value], 1.0)] + ([(column, 1.0)] if column is not None else [])


def _needed_ops(shape: Shape, cut: int) -> set[int]:
    """Ops before `cut` that may have to run again because something from `cut` on reads their values."""
    values = {value for number in range(cut, shape.count) for value in shape.inputs[number]} | shape.final
    found: set[int] = set()
    stack = [shape.producer[value] for value in values]
    while stack:
        number = stack.pop()
        if number < cut and number not in found:
            found.add(number)
            stack += [shape.producer[value] for value in shape.inputs[number]]
    return found
