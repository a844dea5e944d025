"""Checkmate's mixed-integer program over what each stage holds and runs again, in two strengths.

    S[s,v]    value v is in memory when stage s starts        R[s,i]    op i runs again in stage s

    minimise  Σ time_i · R[s,i]
    R[s,c], S[s+1,v], (1 where s ends with the first run of a reader of v)  ≤  S[s,v] + R[s,p]     for a value v of op p

Unordered stages: memory is bounded in whatever order the stage runs its ops, and however often, so that every schedule
within the budget is a point, and the optimum a bound for all of them. P[s,v] ≥ S[s+1,v] - R[s,p]: what is there at the
end and was not computed again was there throughout, also while op k ran again.

    Σ bytes_v · S[s+1,v] + what the first run adds ≤ budget
    Σ bytes_v · P[s,v] + need_k · R[s,k] ≤ budget       for every op k, over the values that k does not touch

Ordered stages: memory at every op k of a pass in graph order. A[s,v,j] says that v is in memory after its j-th reader;
A[s,v,0] ≤ S[s,v] + R[s,p] and after the last reader A is S[s+1,v].

    A[s,v,j] ≤ A[s,v,j-1],   R[s,c] ≤ A[s,v,j-1] for the j-th reader c,
    Σ bytes_v · (v in memory at k) + workspace_k · R[s,k] ≤ budget

Given whole S and R, the least P and A are whole too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd

from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.simulate import simulate
from remat.solvers.backends.program import MixedIntegerProgram
from remat.solvers.exact.stages import Stage, split_steps
from remat.solvers.schedule.editable import FlatProblem

_SCALE = 1e4
"""The plain step's time in the units of the program, so that absolute tolerances stay far below any op."""

Sum = tuple[int | None, ...]
"""Columns that add up; None is the constant 1."""


class Checkmate:
    """The program of this module's docstring, and which column stands for what: `held[s][v]`, `again[s][i]`."""

    def __init__(self, flat: FlatProblem, budget: int, stages: Sequence[Stage]) -> None:
        self.flat, self.stages = flat, stages
        self.program = MixedIntegerProgram()
        base = sum(flat.time)
        self.scale = _SCALE / base if base > 0 else 1.0
        # Whole numbers as small as they get, so that a byte too many is more than a library's tolerance.
        unit = gcd(*flat.size, *flat.workspace) or 1
        self.size = [size // unit for size in flat.size]
        self.workspace = [size // unit for size in flat.workspace]
        self.room = (budget - flat.resident) // unit
        self.held = [{value: self.program.add_column(0.0) for value in stage.wanted} for stage in stages]
        self.again = [
            {number: self.program.add_column(flat.time[number] * self.scale) for number in stage.again}
            for stage in stages
        ]
        for index, stage in enumerate(stages):
            if stage.ordered:
                _Ordered(self, index).add()
            else:
                _Unordered(self, index).add()

    def held_at(self, point: Sequence[float], threshold: float = 0.5) -> list[frozenset[int]]:
        """What the point holds when each stage starts."""
        return [frozenset(value for value, column in held.items() if point[column] > threshold) for held in self.held]

    def point_of(self, problem: Problem, schedule: Schedule) -> dict[int, float]:
        """S and R of a schedule; empty where its order is not one that the stages allow."""
        parts = split_steps(self.stages, schedule)
        if parts is None:
            return {}
        point: dict[int, float] = {}
        ends = simulate(problem, schedule).last_uses
        alive: dict[int, int] = {}
        for index, part in enumerate(parts):
            # Outputs live until after the last step, where the last stage may begin.
            start = min(part.start, len(schedule.steps) - 1)
            point |= {column: float(alive.get(value, -1) >= start) for value, column in self.held[index].items()}
            runs = {schedule.steps[step] for step in part}
            point |= {column: float(number in runs) for number, column in self.again[index].items()}
            for step in part:
                alive.update(zip(self.flat.outputs[schedule.steps[step]], ends[step], strict=True))
        return point


def safe_extra_time(model: Checkmate, bound: float) -> float:
    """The recomputation that a bound of the program stands for, and a little less for the tolerances of libraries."""
    return max(bound * (1 - 1e-7) - 1e-7 * _SCALE, 0.0) / model.scale


class _Stage:
    """What the rows of every stage are made of."""

    def __init__(self, model: Checkmate, index: int) -> None:
        self.model, self.flat, self.program = model, model.flat, model.program
        self.stage, self.held, self.again = model.stages[index], model.held[index], model.again[index]
        self.is_last = index + 1 == len(model.stages)
        self.following: dict[int, int] = {} if self.is_last else model.held[index + 1]
        first = self.stage.first
        self.read_at_end = frozenset(() if first is None else self.flat.inputs[first])

    def sources(self, value: int) -> Sum:
        """Where a reader may find `value`: held from the start, or computed again."""
        column = self.again.get(self.flat.producer[value])
        return (self.held[value],) if column is None else (self.held[value], column)

    def after(self, value: int) -> Sum:
        """Whether `value` is in memory after the stage."""
        if self.is_last:
            return (None,) if value in self.flat.final else ()
        return (self.following[value],) if value in self.following else ()

    def add_cover(self, sources: Sum, wish: Sum) -> None:
        """A row: what `wish` asks for is in `sources`."""
        terms = [(column, 1.0) for column in sources if column is not None]
        terms += [(column, -1.0) for column in wish if column is not None]
        self.program.add_row(terms, lower=float(wish.count(None) - sources.count(None)))

    def add_capacity(self, load: Mapping[int | None, int]) -> None:
        """A row: what is in memory fits; `load` has the bytes of each column, those of None always there."""
        room = max(self.model.room, 1)
        terms = [(column, amount / room) for column, amount in load.items() if column is not None and amount]
        self.program.add_row(terms, upper=(self.model.room - load.get(None, 0)) / room)


class _Unordered(_Stage):
    """Rows that hold in whatever order the stage runs its ops."""

    def add(self) -> None:
        at_end = self._at_end()
        self._add_needs(at_end)
        first = self.stage.first
        load = self._load(at_end)
        if first is not None:
            load[None] += self.model.workspace[first] + sum(self.model.size[v] for v in self.flat.outputs[first])
        self.add_capacity(load)
        if self.stage.again:
            self._add_reruns(self._throughout(at_end))

    def _at_end(self) -> dict[int, Sum]:
        """Whether each value is in memory while the stage's last op runs; values that cannot be are left out."""
        found = {value: (None,) if value in self.read_at_end else self.after(value) for value in self.stage.wanted}
        return {value: there for value, there in found.items() if there}

    def _add_needs(self, at_end: dict[int, Sum]) -> None:
        for value, there in at_end.items():
            self.add_cover(self.sources(value), there)
        for number, column in self.again.items():
            for value in self.flat.inputs[number]:
                if value in self.held:
                    self.add_cover(self.sources(value), (column,))

    def _throughout(self, at_end: dict[int, Sum]) -> dict[int, Sum]:
        """Whether each value is in memory from the start to the end: it is at the end, and not computed again."""
        result: dict[int, Sum] = {}
        for value, there in at_end.items():
            column = self.again.get(self.flat.producer[value])
            if column is None:
                result[value] = there
            else:
                result[value] = (self.program.add_column(0.0, integer=False),)
                self.add_cover((*result[value], column), there)
        return result

    def _add_reruns(self, throughout: dict[int, Sum]) -> None:
        """What is there throughout, as one column, and what op k needs on top of it."""
        size, room = self.model.size, max(self.model.room, 1)
        total = self.program.add_column(0.0, integer=False)
        load = self._load(throughout)
        load[total] = -room
        # `total` is a share of the room, and at least what is there: Σ bytes - room · total ≤ 0.
        load[None] += self.model.room
        self.add_capacity(load)
        for number, column in self.again.items():
            touched = {*self.flat.inputs[number], *self.flat.outputs[number]}
            load = self._load({value: throughout[value] for value in touched if value in throughout}, sign=-1)
            load[total] = room
            load[column] = self.model.workspace[number] + sum(size[value] for value in touched)
            self.add_capacity(load)

    def _load(self, there: dict[int, Sum], sign: int = 1) -> dict[int | None, int]:
        load: dict[int | None, int] = {None: 0}
        for value, columns in there.items():
            for column in columns:
                load[column] = load.get(column, 0) + sign * self.model.size[value]
        return load


class _Ordered(_Stage):
    """Rows for memory at every op of a pass in graph order."""

    def __init__(self, model: Checkmate, index: int) -> None:
        super().__init__(model, index)
        first = self.stage.first
        self.slots = [*self.stage.again, *([] if first is None else [first])]
        self.load: dict[int | None, int] = {}

    def add(self) -> None:
        """Follow the pass op by op, with the load as a sum of columns."""
        chains = {value: self._chain(value, readers) for value, readers in self._readers().items()}
        for value in self.stage.wanted:
            self._count(value, (self.held[value],), 1)
        for number in self.slots:
            runs: Sum = (self.again.get(number),)
            self._run(number, runs, 1)
            self.add_capacity(self.load)
            self._run(number, runs, -1)
            for value in self.flat.outputs[number]:
                if value in chains:
                    self._count(value, (self.held[value],), -1)
                    self._count(value, chains[value][0], 1)
            for value in self.flat.inputs[number]:
                if value in chains:
                    self._count(value, chains[value].pop(0), -1)
                    self._count(value, chains[value][0], 1)

    def _readers(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {value: [] for value in self.stage.wanted}
        for number in self.slots:
            for value in self.flat.inputs[number]:
                if value in found:
                    found[value].append(number)
        return found

    def _chain(self, value: int, readers: list[int]) -> list[Sum]:
        """Whether `value` is in memory before its first reader, between readers, and after the last; adds rows."""
        chain = [self._before_readers(value)]
        for position, reader in enumerate(readers):
            self.add_cover(chain[-1], (self.again.get(reader),))
            is_last = position + 1 == len(readers)
            chain.append(self.after(value) if is_last else (self.program.add_column(0.0, integer=False),))
            self.add_cover(chain[-2], chain[-1])
        if not readers:
            self.add_cover(chain[0], self.after(value))
        return chain

    def _before_readers(self, value: int) -> Sum:
        """One column of its own where the op may run for the sake of another of its outputs."""
        sources = self.sources(value)
        if len(sources) == 1 or len(self.flat.outputs[self.flat.producer[value]]) == 1:
            return sources
        column = self.program.add_column(0.0, integer=False)
        self.add_cover(sources, (column,))
        return (column,)

    def _run(self, number: int, runs: Sum, sign: int) -> None:
        outputs = sum(self.model.size[value] for value in self.flat.outputs[number])
        self._add(runs[0], sign * (self.model.workspace[number] + outputs))

    def _count(self, value: int, columns: Sum, sign: int) -> None:
        for column in columns:
            self._add(column, sign * self.model.size[value])

    def _add(self, column: int | None, amount: int) -> None:
        self.load[column] = self.load.get(column, 0) + amount
