"""The files that buffers can be read from: MiniMalloc's CSV, and plans, problems and instances as JSON.

In: a path and a capacity. Out: a `LayoutProblem`. A plan is laid out as it is scheduled, a problem or instance in the
order of its file; what is resident has its place elsewhere and is not among the buffers.
"""

from __future__ import annotations

from pathlib import Path

from remat.core.codec import FORMAT as PLAN_FORMAT
from remat.core.codec import VERSION as PLAN_VERSION
from remat.core.codec import load_plan
from remat.core.document import read_document
from remat.core.instance import VERSIONS, load_problem
from remat.core.problem import Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.errors import FileFormatError, InfeasibleLayout
from remat.layout.csv_file import load_csv
from remat.layout.liveness import lifetimes
from remat.layout.problem import LayoutProblem

_READABLE = {PLAN_FORMAT: PLAN_VERSION, **VERSIONS}


def load_layout(path: Path, capacity: int | None = None) -> LayoutProblem:
    """The buffers of a file; what ends in .json is a plan, a problem or an instance, anything else is CSV."""
    if path.suffix.lower() != ".json":
        return load_csv(path, capacity)
    buffers = lifetimes(*_scheduled(path))
    largest = max(buffers, key=lambda buffer: buffer.size, default=None)
    if capacity is not None and largest is not None and largest.size > capacity:
        what = f"buffer {largest.id} of size {largest.size} is larger than the capacity {capacity}"
        raise InfeasibleLayout(f"{path}: {what}; raise the capacity.", largest.size)
    return LayoutProblem(buffers, capacity)


def _scheduled(path: Path) -> tuple[Problem, Schedule]:
    if read_document(path, _READABLE).text("format") != PLAN_FORMAT:
        problem = load_problem(path)
        return problem, plain_schedule(problem.graph)
    plan = load_plan(path)
    if plan.schedule is None:
        raise FileFormatError(f"{path} is a plan without a schedule ({plan.status.value}); plan with more memory.")
    return plan.problem, plan.schedule
