"""What `cp_sat` runs in a process of its own: OR-Tools brings a HiGHS of its own, and one process cannot load both.

In: a request on standard input. Out: the best schedule found and whether nothing in the model is better, on standard
output.
"""

from __future__ import annotations

import json
import sys

from remat.core.copies import computing_steps, has_copies
from remat.core.document import Record
from remat.core.files.problem_file import decode_problem
from remat.core.graph import OpId
from remat.core.schedule import Schedule
from remat.core.simulate import simulate
from remat.solvers.exact.retention import Retention
from remat.solvers.exact.retention_with_copies import RetentionWithCopies


def main() -> None:
    """Read a request, search, and write the answer."""
    request = Record(json.load(sys.stdin), "request")
    model = _model(request)
    schedule, is_complete = model.search(
        request.number("time_limit_s"), workers=request.integer("workers"), seed=request.integer("seed")
    )
    json.dump([None if schedule is None else schedule.steps, is_complete], sys.stdout)


def _model(request: Record) -> Retention:
    problem = decode_problem(request.record("problem"))
    known = Schedule(tuple(map(OpId, request.integers("known"))))
    computations, passes = request.integer("computations"), request.integer("passes")
    if not has_copies(problem.graph):
        model = Retention(problem, computations, passes)
        model.hint(known)
        return model
    limit_ns = simulate(problem, known).time_ns if known.steps else None
    moving = RetentionWithCopies(problem, computations, passes, limit_ns)
    moving.hint(computing_steps(problem.graph, known))
    return moving
