"""Retention intervals by constraint programming (Moccasin, 2023), on OR-Tools' CP-SAT.

In: a problem. Out: the fastest schedule found in which no op runs more than `computations` times. More runs could be
faster still, so the bound is the plain step's time. The search is in `retention`, in a process of its own: OR-Tools
brings a HiGHS of its own, and one process cannot load both.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import final

from remat.core.graph import OpId
from remat.core.instance import encode_problem
from remat.core.schedule import Schedule
from remat.errors import MissingExtra
from remat.solvers.child import run_child
from remat.solvers.exact import Exact, ExactSolver

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
    clock: Callable[[], float] = time.monotonic

    def search(self, found: Exact, seed: int) -> str:
        """Start from a quick schedule, then search in a child process."""
        found.start_quickly(seed)
        return "" if found.is_closed else self._search(found, seed)

    def _search(self, found: Exact, seed: int) -> str:
        """Search in a child process, offer what it finds, and return the reason why it stopped."""
        if find_spec("ortools") is None:
            raise MissingExtra("Solving with CP-SAT needs ortools; install `remat[solvers]`.")
        reads = sum(len(op.inputs) for op in found.problem.graph.ops) * self.computations**2
        if found.left_s() <= 0 or reads > MAX_READS:
            return "Out of time." if reads <= MAX_READS else f"A model of more than {MAX_READS} reads is not tried."
        content = run_child("remat.solvers.retention", self._request(found, seed), found.left_s())
        steps, is_complete = (None, False) if content is None else json.loads(content)
        if steps is not None:
            found.offer(Schedule(tuple(map(OpId, steps))), "cp_sat")
        if found.is_closed:
            return "Proven optimal."
        within = f"with at most {self.computations} runs of each op"
        return f"{found.what} {within}." if is_complete else f"Out of time; searched {within}."

    def _request(self, found: Exact, seed: int) -> bytes:
        fields = {
            "problem": encode_problem(found.problem),
            "known": list(found.best.steps) if found.best is not None else [],
            "computations": self.computations,
            "passes": self.passes,
            "workers": self.workers,
            "seed": seed % 2**31,
            "time_limit_s": found.left_s(),
        }
        return json.dumps(fields).encode()
