"""Retention intervals by constraint programming (Moccasin, 2023), on OR-Tools' CP-SAT.

In: a problem. Out: the fastest schedule found in which no op runs more than `computations` times. Every run of an op is
a moment, stage by stage and within a stage in `passes` passes over the ops in graph order; every version of a value
is an interval from its run to its last reader, and the intervals share the budget. A reader picks one version of each
value it reads. More runs per op could be faster still, so the bound is the plain step's time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any, final

from remat.core.graph import OpId
from remat.core.problem import Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.core.solution import Solution, Status
from remat.errors import MissingExtra
from remat.solvers.base import Progress, judge
from remat.solvers.exact import Exact
from remat.solvers.stages import stage_of_steps
from remat.solvers.start import quick_schedule
from remat.solvers.tape import Shape, shape_of

MAX_READS = 200_000
"""Pairs of a reading run and a version it may read; larger models take longer to build than they are worth."""
START_S = 2.0
_SCALE = 1e6
"""Times that are not whole numbers are rounded to this share of the plain step."""


@final
@dataclass(frozen=True, slots=True)
class CpSat:
    name: str = "cp_sat"
    computations: int = 2
    """The most times that an op may run."""
    passes: int = 2
    """How often a stage may go through the ops."""
    workers: int = 1
    """Threads; with more than one, two runs may differ."""
    clock: Callable[[], float] = time.monotonic

    def solve(
        self,
        problem: Problem,
        *,
        time_limit_s: float,
        seed: int = 0,
        progress: Callable[[Progress], None] | None = None,
    ) -> Solution:
        plain = judge(problem, plain_schedule(problem.graph), self.name)
        if plain.status is not Status.INFEASIBLE:
            return plain
        found = Exact(problem, time_limit_s=time_limit_s, clock=self.clock, progress=progress)
        if found.is_possible:
            found.offer(quick_schedule(problem, time_limit_s=START_S, clock=self.clock, seed=seed), "start")
        reason = "" if found.is_closed else self._search(found, seed)
        return found.conclude(self.name, reason)

    def _search(self, found: Exact, seed: int) -> str:
        shape = shape_of(found.problem)
        if found.left_s() <= 0:
            return "Out of time."
        if sum(map(len, shape.inputs)) * self.computations**2 > MAX_READS:
            return f"A model of more than {MAX_READS} reads is not tried."
        model = _Model(shape, found.problem.budget_bytes, self.computations, self.passes)
        if found.best is not None:
            model.hint(found.best)
        is_complete = model.solve(found, self.workers, seed)
        if found.is_closed:
            return "Proven optimal."
        within = f"with at most {self.computations} runs of each op"
        return f"The best {within}." if is_complete else f"Out of time; searched {within}."


class _Model:
    """Runs and versions. `moment[i][b]` says when run b of op i is, as a pass number; `runs[i][b]` whether it is."""

    def __init__(self, shape: Shape, budget: int, computations: int, passes: int) -> None:
        self.cp = _cp_model()
        self.model = self.cp.CpModel()
        self.shape, self.passes = shape, passes
        self.horizon = (shape.count + 1) * passes
        unit = gcd(*shape.size, *shape.workspace) or 1
        self.size = [size // unit for size in shape.size]
        self.workspace = [size // unit for size in shape.workspace]
        self.room = (budget - shape.resident) // unit
        self.moment: list[list[Any]] = []
        self.runs: list[list[Any]] = []
        self.last: dict[tuple[int, int], Any] = {}
        self.intervals: list[Any] = []
        self.demands: list[int] = []
        for number in range(shape.count):
            self._add_runs(number, computations if shape.recomputable[number] else 1)
        for number in range(shape.count):
            self._add_reads(number)
        self._add_end()
        self.model.add_cumulative(self.intervals, self.demands, self.room)
        self.model.minimize(sum(cost * run for cost, run in self._costs()))

    def key(self, number: int, run: int) -> Any:
        """When the run is, among all steps."""
        return self.moment[number][run] * self.shape.count + number

    def hint(self, schedule: Schedule) -> None:
        """Start from a schedule, as far as it has no more runs than this model."""
        keys: dict[int, list[int]] = {}
        for number, stage in zip(schedule.steps, stage_of_steps(schedule), strict=True):
            keys.setdefault(number, []).append(stage * self.passes + self.passes - 1)
        for op, runs in enumerate(self.runs):
            for run in range(1, len(runs)):
                there = run < len(keys[op])
                self.model.add_hint(runs[run], there)
                if there:
                    self.model.add_hint(self.moment[op][run], keys[op][run])

    def solve(self, found: Exact, workers: int, seed: int) -> bool:
        """Search, offer what is found, and say whether nothing in this model is better."""
        solver = self.cp.CpSolver()
        solver.parameters.max_time_in_seconds = max(found.left_s(), 0.01)
        solver.parameters.num_workers = workers
        solver.parameters.random_seed = seed % 2**31
        status = solver.solve(self.model)
        if status in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            found.offer(self._schedule(solver), "cp_sat")
        return status in (self.cp.OPTIMAL, self.cp.INFEASIBLE)

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
        """Intervals for the outputs of a run, and for its workspace."""
        model, there, start = self.model, self.runs[number][run], self.key(number, run)
        end = self.horizon * self.shape.count
        for value in self.shape.outputs[number]:
            if self.size[value]:
                last = self.last[value, run] = model.new_int_var(0, end, "")
                model.add(last >= start)
                length = model.new_int_var(1, end + 1, "")
                self.intervals.append(model.new_optional_interval_var(start, length, last + 1, there, ""))
                self.demands.append(self.size[value])
        if self.workspace[number]:
            self.intervals.append(model.new_optional_fixed_size_interval_var(start, 1, there, ""))
            self.demands.append(self.workspace[number])

    def _add_reads(self, number: int) -> None:
        for run, there in enumerate(self.runs[number]):
            for value in self.shape.inputs[number]:
                if self.size[value]:
                    self._add_read(value, self.key(number, run), there)

    def _add_read(self, value: int, when: Any, there: Any) -> None:
        """A reader at `when`, if it is `there`, reads one version that was computed before and lives until then."""
        producer = self.shape.producer[value]
        picks = []
        for run, is_run in enumerate(self.runs[producer]):
            pick = self.model.new_bool_var("")
            self.model.add_implication(pick, is_run)
            self.model.add(self.key(producer, run) < when).only_enforce_if(pick)
            self.model.add(self.last[value, run] >= when).only_enforce_if(pick)
            picks.append(pick)
        self.model.add_bool_or([*picks, ~there])

    def _add_end(self) -> None:
        """Outputs live to the end, after every run."""
        for value in self.shape.final:
            if self.size[value]:
                self._add_read(value, self.horizon * self.shape.count, self.model.new_constant(1))

    def _costs(self) -> list[tuple[int, Any]]:
        """What each further run costs, as a whole number."""
        base, times = sum(self.shape.time), self.shape.time
        whole = all(float(cost).is_integer() for cost in times) and base < 2**50
        scale = 1.0 if whole or base <= 0 else _SCALE * len(times) / base
        return [(round(times[number] * scale), run) for number, runs in enumerate(self.runs) for run in runs[1:]]

    def _schedule(self, solver: Any) -> Schedule:
        steps = [
            (solver.value(moment), number)
            for number, moments in enumerate(self.moment)
            for moment, run in zip(moments, self.runs[number], strict=True)
            if solver.value(run)
        ]
        return Schedule(tuple(OpId(number) for _, number in sorted(steps)))


def _cp_model() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise MissingExtra("Solving with CP-SAT needs ortools; install `remat[solvers]`.") from error
    return cp_model
