"""A problem solved in a process of its own, while training goes on in this one.

In: a problem and how to look for its schedule, as one line of JSON on standard input. Out: the steps of the fastest
schedule found that really fits, on standard output; none where nothing does.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass

from remat.core.document import Record
from remat.core.files.problem_file import decode_problem, encode_problem
from remat.core.graph import OpId
from remat.core.memory_rules import memory_rules
from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.search.child_process import run_child
from remat.errors import InfeasibleBudget
from remat.within import fit_within

POLITENESS = 5
"""By how much a search stands back: enough that training comes first, and not so much that it never ends."""
PATIENCE = 10.0
"""How many times its time limit a search may take, which is asked again where its schedule does not fit."""


@dataclass(frozen=True, slots=True)
class SearchApart:
    """What is to be solved, and how."""

    problem: Problem
    device: str
    solver: str
    time_limit_s: float
    seed: int

    def run(self) -> Schedule | None:
        """The schedule that another process found; None where it found none in time."""
        wanted = {
            "problem": encode_problem(self.problem),
            "device": self.device,
            "solver": self.solver,
            "time_limit": self.time_limit_s,
            "seed": self.seed,
        }
        answer = run_child("remat.solve_apart", json.dumps(wanted).encode(), PATIENCE * self.time_limit_s)
        steps = json.loads(answer)["steps"] if answer else []
        return Schedule(tuple(map(OpId, steps))) if steps else None


def main() -> None:
    """Answer one question; whoever trains comes first."""
    os.nice(POLITENESS)
    record = Record(json.loads(sys.stdin.buffer.read()), "the problem to solve")
    problem = decode_problem(record.record("problem"))
    try:
        found = fit_within(
            problem,
            record.text("solver"),
            rules=memory_rules(record.text("device")),
            time_limit_s=record.number("time_limit"),
            seed=record.integer("seed"),
        )
    except InfeasibleBudget:
        steps: list[int] = []
    else:
        schedule = found.solution.schedule
        steps = list(schedule.steps) if schedule is not None else []
    json.dump({"steps": steps}, sys.stdout)
