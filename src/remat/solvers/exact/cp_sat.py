"""Retention intervals by constraint programming (Moccasin, 2023), on OR-Tools' CP-SAT.

In: a problem. Out: the fastest schedule found in which no op runs more than `computations` times. More runs could be
faster still, so the bound is the plain step's time. The search is in `retention`, and in `retention_with_copies` where
values may be copied to the host, in a process of its own (`cp_sat_child`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import final

from remat.core.copies import movable_of, with_copies, without_copies
from remat.core.files.problem_file import encode_problem
from remat.core.graph import OpId
from remat.core.problem import Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.core.search.child_process import run_child
from remat.core.search.limits import Countdown, Limits
from remat.core.simulate import simulate
from remat.errors import MissingExtra
from remat.solvers.exact.exact_solver import ExactSolver, start_quickly, what_was_found
from remat.solvers.exact.retention_with_copies import places
from remat.solvers.schedule.overwrite import always_overwritten
from remat.solvers.schedule.to_host import fit_by_copies, trips_without_waiting
from remat.solvers.search.around_trips import around_trips
from remat.solvers.search.incumbent import ScheduleIncumbent

MAX_READS = 200_000
"""Pairs of a reading run and a version it may read; larger models take longer to build than they are worth."""
MAX_PLACES = 60_000
"""Choices of a stage or a gap in a model with copies; the same holds."""


@final
@dataclass(frozen=True, slots=True)
class CpSat(ExactSolver):
    name: str = "cp_sat"
    computations: int = 2
    """The most times that an op may run."""
    passes: int = 2
    """How often a stage may go through the ops."""
    workers: int = 1
    """Threads; with more than one, two runs may differ."""

    def search(self, incumbent: ScheduleIncumbent) -> str:
        """Start from a quick schedule, then search in a child process."""
        start_quickly(incumbent)
        return "" if incumbent.is_closed else self._search(incumbent)

    def schedules_with_copies(
        self, problem: Problem, limits: Limits, raise_bound: Callable[[float], None]
    ) -> Iterator[Schedule]:
        """Two quick ones, then the best of the model; nothing is proven of schedules with more runs or copies."""
        countdown = Countdown(limits)
        known: list[Schedule] = []
        for quick in _quickly(problem, lambda: countdown.left_s() <= 0):
            known.append(quick)
            yield quick
        best = min(known, key=lambda steps: simulate(problem, steps).time_ns, default=None)
        is_small = places(problem, self.computations) <= MAX_PLACES
        for changed in _overwriting_or_not(problem) if is_small else ():
            if countdown.left_s() <= 0:
                return
            steps, _ = self._ask(changed, best, limits.within(countdown.left_s()))
            if steps is not None:
                yield steps
                if simulate(problem, steps).peak_bytes <= problem.budget_bytes:
                    return

    def _search(self, incumbent: ScheduleIncumbent) -> str:
        """Search in a child process, offer what it finds, and return the reason why it stopped."""
        reads = sum(len(op.inputs) for op in incumbent.problem.graph.ops) * self.computations**2
        if incumbent.left_s() <= 0 or reads > MAX_READS:
            return "Out of time." if reads <= MAX_READS else f"A model of more than {MAX_READS} reads is not tried."
        limits = incumbent.limits.within(incumbent.left_s())
        steps, is_complete = self._ask(incumbent.problem, incumbent.best, limits)
        if steps is not None:
            incumbent.offer_schedule(steps, "cp_sat")
        if incumbent.is_closed:
            return "Proven optimal."
        within = f"with at most {self.computations} runs of each op"
        return f"{what_was_found(incumbent)} {within}." if is_complete else f"Out of time; searched {within}."

    def _ask(self, problem: Problem, known: Schedule | None, limits: Limits) -> tuple[Schedule | None, bool]:
        """The best schedule that a child process finds, and whether nothing in the model is better."""
        if find_spec("ortools") is None:
            raise MissingExtra("Solving with CP-SAT needs ortools; install `remat[solvers]`.")
        fields = {
            "problem": encode_problem(problem),
            "known": list(known.steps) if known is not None else [],
            "computations": self.computations,
            "passes": self.passes,
            "workers": self.workers,
            "seed": limits.seed % 2**31,
            "time_limit_s": limits.time_limit_s,
        }
        content = run_child("remat.solvers.exact.cp_sat_child", json.dumps(fields).encode(), limits.time_limit_s)
        steps, is_complete = (None, False) if content is None else json.loads(content)
        return (None if steps is None else Schedule(tuple(map(OpId, steps)))), is_complete


def _quickly(problem: Problem, stop: Callable[[], bool]) -> Iterator[Schedule]:
    """The plain step made to fit by copies, and by copies that nobody waits for and recomputation."""
    plain = plain_schedule(without_copies(problem).graph)
    steps = fit_by_copies(problem, plain)
    if steps is not None:
        yield steps
    made = around_trips(problem, plain, trips_without_waiting(problem, plain), stop)
    if made is not None:
        yield made.steps


def _overwriting_or_not(problem: Problem) -> Iterator[Problem]:
    """The problem as if ops that may write over their input always did; and as it is, where they never do."""
    plain = without_copies(problem)
    changed = always_overwritten(plain)
    if changed is not plain:
        yield with_copies(changed, movable_of(problem))
    yield problem
