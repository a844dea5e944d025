"""Retention intervals by constraint programming (Moccasin, 2023), on OR-Tools' CP-SAT.

In: a problem. Out: the fastest schedule found in which no op runs more than `computations` times. More runs could be
faster still, so the bound is the plain step's time. The search is in `retention`, in a process of its own: OR-Tools
brings a HiGHS of its own, and one process cannot load both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from typing import final

from remat.core.files.problem_file import encode_problem
from remat.core.graph import OpId
from remat.core.schedule import Schedule
from remat.core.search.child_process import run_child
from remat.errors import MissingExtra
from remat.solvers.exact.exact_solver import ExactSolver, start_quickly, what_was_found
from remat.solvers.search.incumbent import ScheduleIncumbent

MAX_READS = 200_000
"""Pairs of a reading run and a version it may read; larger models take longer to build than they are worth."""


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

    def _search(self, incumbent: ScheduleIncumbent) -> str:
        """Search in a child process, offer what it finds, and return the reason why it stopped."""
        if find_spec("ortools") is None:
            raise MissingExtra("Solving with CP-SAT needs ortools; install `remat[solvers]`.")
        reads = sum(len(op.inputs) for op in incumbent.problem.graph.ops) * self.computations**2
        if incumbent.left_s() <= 0 or reads > MAX_READS:
            return "Out of time." if reads <= MAX_READS else f"A model of more than {MAX_READS} reads is not tried."
        content = run_child("remat.solvers.exact.retention", self._request(incumbent), incumbent.left_s())
        steps, is_complete = (None, False) if content is None else json.loads(content)
        if steps is not None:
            incumbent.offer_schedule(Schedule(tuple(map(OpId, steps))), "cp_sat")
        if incumbent.is_closed:
            return "Proven optimal."
        within = f"with at most {self.computations} runs of each op"
        return f"{what_was_found(incumbent)} {within}." if is_complete else f"Out of time; searched {within}."

    def _request(self, incumbent: ScheduleIncumbent) -> bytes:
        fields = {
            "problem": encode_problem(incumbent.problem),
            "known": list(incumbent.best.steps) if incumbent.best is not None else [],
            "computations": self.computations,
            "passes": self.passes,
            "workers": self.workers,
            "seed": incumbent.limits.seed % 2**31,
            "time_limit_s": incumbent.left_s(),
        }
        return json.dumps(fields).encode()
