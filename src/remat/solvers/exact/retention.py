"""The constraint program of `cp_sat`: runs are moments, versions are intervals that share the budget.

In: a problem, how often an op may run and in how many passes, a schedule to start from. Out: the best schedule found,
and whether nothing in this model is better. Every run of an op is a moment, stage by stage and within a stage in passes
over the ops in graph order; every version of a value is an interval from its run to its last reader. A reader picks
one version of each value it reads. `cp_sat_child` is what a process of its own runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

from remat.core.graph import OpId
from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.solvers.exact.stages import stage_of_steps
from remat.solvers.schedule.editable import flatten

_SCALE = 1e6
"""Times that are not whole numbers are rounded to this share of the mean op."""


@dataclass(frozen=True, slots=True)
class Reader:
    """A run that reads, if it is there; `number` is None for the end of the step."""

    when: Any
    there: Any
    number: int | None = None
    run: int = 0


class Retention:
    """Runs and versions. `moment[i][b]` says when run b of op i is, as a pass number; `runs[i][b]` whether it is."""

    def __init__(self, problem: Problem, computations: int, passes: int) -> None:
        from ortools.sat.python import cp_model

        self.cp = cp_model
        self.model = cp_model.CpModel()
        self.flat, self.passes = flatten(problem), passes
        flat, budget = self.flat, problem.budget_bytes
        self.horizon = (flat.count + 1) * passes
        unit = gcd(*flat.size, *flat.workspace) or 1
        self.size = [size // unit for size in flat.size]
        self.workspace = [size // unit for size in flat.workspace]
        self.room = (budget - flat.resident) // unit
        self.scale = _scale(flat.time)
        self.moment: list[list[Any]] = []
        self.runs: list[list[Any]] = []
        self.last: dict[tuple[int, int], Any] = {}
        self.intervals: list[Any] = []
        self.demands: list[int] = []
        for number in range(flat.count):
            self._add_runs(number, computations if flat.recomputable[number] else 1)
        self.add_trips()
        for number in range(flat.count):
            self._add_reads(number)
        self._add_end()
        self.model.add_cumulative(self.intervals, self.demands, self.room)
        self.model.minimize(self.extra_time())

    def add_trips(self) -> None:
        """Where values may be copied, add what becomes of them."""

    def picks_of_trips(self, value: int, reader: Reader) -> list[Any]:
        """Versions that were copied, to be picked by a reader."""
        return []

    def extra_time(self) -> Any:
        """What is minimised."""
        return sum(self.whole(self.flat.time[n]) * run for n, runs in enumerate(self.runs) for run in runs[1:])

    def key(self, number: int, run: int) -> Any:
        """When the run is, among all steps."""
        return self.moment[number][run] * self.flat.count + number

    def hint(self, schedule: Schedule) -> None:
        """Start from a schedule, as far as it has no more runs than this model."""
        if not schedule.steps:
            return
        keys: dict[int, list[int]] = {}
        for number, stage in zip(schedule.steps, stage_of_steps(schedule), strict=True):
            keys.setdefault(number, []).append(stage * self.passes + self.passes - 1)
        for op, runs in enumerate(self.runs):
            for run in range(1, len(runs)):
                there = run < len(keys[op])
                self.model.add_hint(runs[run], there)
                if there:
                    self.model.add_hint(self.moment[op][run], keys[op][run])

    def search(self, time_limit_s: float, *, workers: int = 1, seed: int = 0) -> tuple[Schedule | None, bool]:
        """The best schedule found, and whether nothing in this model is better."""
        solver = self.cp.CpSolver()
        solver.parameters.max_time_in_seconds = max(time_limit_s, 0.01)
        solver.parameters.num_workers = workers
        solver.parameters.random_seed = seed
        status = solver.solve(self.model)
        has_schedule = status in (self.cp.OPTIMAL, self.cp.FEASIBLE)
        is_complete = status in (self.cp.OPTIMAL, self.cp.INFEASIBLE)
        return self.read_schedule(solver) if has_schedule else None, is_complete

    def _add_runs(self, number: int, most: int) -> None:
        model, passes = self.model, self.passes
        first = number * passes + passes - 1
        moments, runs = [model.new_constant(first)], [model.new_constant(1)]
        for run in range(1, most):
            moments.append(model.new_int_var(first + 1, self.horizon - 1, ""))
            runs.append(model.new_bool_var(""))
            model.add_implication(runs[run], runs[run - 1])
            model.add(moments[run] > moments[run - 1]).only_enforce_if(runs[run])
            # A run that is not made has one place, so that it is not searched for.
            model.add(moments[run] == self.horizon - 1).only_enforce_if(~runs[run])
        self.moment.append(moments)
        self.runs.append(runs)
        for run in range(most):
            self._add_memory(number, run)

    def _add_memory(self, number: int, run: int) -> None:
        """Intervals for the outputs of a run, and for what it needs besides while it runs."""
        model, there, start = self.model, self.runs[number][run], self.key(number, run)
        end = self.horizon * self.flat.count
        # Outputs of an op with a negative workspace take the place of inputs: they count from the next step on.
        late = int(self.workspace[number] < 0)
        own = self.workspace[number]
        for value in self.flat.outputs[number]:
            if self.size[value]:
                last = self.last[value, run] = model.new_int_var(0, end, "")
                model.add(last >= start)
                length = model.new_int_var(1 - late, end + 1, "")
                self.intervals.append(model.new_optional_interval_var(start + late, length, last + 1, there, ""))
                self.demands.append(self.size[value])
                own += late * self.size[value]
        if own:
            self.intervals.append(model.new_optional_fixed_size_interval_var(start, 1, there, ""))
            self.demands.append(own)

    def _add_reads(self, number: int) -> None:
        for run, there in enumerate(self.runs[number]):
            for value in self.flat.inputs[number]:
                if self.size[value]:
                    self._add_read(value, Reader(self.key(number, run), there, number, run))

    def _add_read(self, value: int, reader: Reader) -> None:
        """The reader, if it is there, reads one version that was computed before and lives until then."""
        producer = self.flat.producer[value]
        picks = self.picks_of_trips(value, reader)
        for run, is_run in enumerate(self.runs[producer]):
            pick = self.model.new_bool_var("")
            self.model.add_implication(pick, is_run)
            self.model.add(self.key(producer, run) < reader.when).only_enforce_if(pick)
            self.model.add(self.last[value, run] >= reader.when).only_enforce_if(pick)
            picks.append(pick)
        self.model.add_bool_or([*picks, ~reader.there])

    def _add_end(self) -> None:
        """Outputs live to the end, after every run."""
        for value in self.flat.final:
            if self.size[value]:
                self._add_read(value, Reader(self.horizon * self.flat.count, self.model.new_constant(1)))

    def whole(self, time_ns: float) -> int:
        """A time as a whole number, in this model's own unit."""
        return round(time_ns * self.scale)

    def read_runs(self, solver: Any) -> list[tuple[int, int]]:
        """The moment and the op of each run, in order."""
        return sorted(
            (solver.value(moment), number)
            for number, moments in enumerate(self.moment)
            for moment, run in zip(moments, self.runs[number], strict=True)
            if solver.value(run)
        )

    def read_schedule(self, solver: Any) -> Schedule:
        return Schedule(tuple(OpId(number) for _, number in self.read_runs(solver)))


def _scale(times: tuple[float, ...]) -> float:
    base = sum(times)
    is_whole = all(float(cost).is_integer() for cost in times) and base < 2**50
    return 1.0 if is_whole or base <= 0 else _SCALE * len(times) / base
