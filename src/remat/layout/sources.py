"""The files that buffers can be read from: MiniMalloc's CSV, and plans, problems and instances as JSON.

In: a path and a capacity. Out: a `LayoutProblem`. A plan is laid out as it is scheduled, a problem or instance in the
order of its file; what is resident has its place elsewhere and is not among the buffers.
"""

from __future__ import annotations

from pathlib import Path

from remat.core.document import read_document
from remat.core.files.plan_file import FORMAT as PLAN_FORMAT
from remat.core.files.plan_file import VERSION as PLAN_VERSION
from remat.core.files.plan_file import decode_plan
from remat.core.files.problem_file import VERSIONS, decode_either
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
    record = read_document(path, _READABLE)
    if record.text("format") != PLAN_FORMAT:
        problem = decode_either(record)
        return problem, plain_schedule(problem.graph)
    plan = decode_plan(record, path)
    if plan.schedule is None:
        raise FileFormatError(f"{path} is a plan without a schedule ({plan.status.value}); plan with more memory.")
    return plan.problem, plan.schedule
