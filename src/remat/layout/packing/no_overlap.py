"""The constraint model of address assignment, run in a process of its own: one JSON object in, one out.

Each buffer is an interval of addresses. Buffers of one section, all alive together, must not overlap: one constraint
for each section, which CP-SAT turns into the order of its buffers. Buffers of the same life and size stand in a fixed
order, because exchanging them changes nothing. Out: offsets, or null, and the lowest height that is not excluded.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from itertools import pairwise
from typing import Any


def main() -> None:
    request = json.load(sys.stdin)
    sys.stdout.write(json.dumps(solve(request)))


def solve(request: dict[str, Any]) -> dict[str, Any]:
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    offsets, height = _variables(model, request)
    _separate(model, request, offsets)
    if request["minimize"]:
        model.minimize(height)
    for variable, offset in zip(offsets, request["known"], strict=True):
        model.add_hint(variable, offset)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = request["workers"]
    solver.parameters.random_seed = request["seed"]
    solver.parameters.max_time_in_seconds = request["time_limit_s"]
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return {"offsets": None, "bound": request["highest"] + 1}
    bound = int(solver.best_objective_bound) if request["minimize"] else request["bound"]
    has_answer = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return {
        "offsets": [solver.value(variable) for variable in offsets] if has_answer else None,
        "bound": max(bound, request["bound"]),
    }


def _variables(model: Any, request: dict[str, Any]) -> tuple[list[Any], Any]:
    """An offset for each buffer, and the height above all of them."""
    highest = request["highest"]
    height = model.new_int_var(request["bound"], highest, "height")
    offsets = []
    for number, (size, alignment) in enumerate(zip(request["size"], request["alignment"], strict=True)):
        offset = model.new_int_var(0, highest - size, f"offset_{number}")
        if alignment > 1:
            multiple = model.new_int_var(0, (highest - size) // alignment, f"multiple_{number}")
            model.add(offset == alignment * multiple)
        model.add(offset + size <= height)
        offsets.append(offset)
    return offsets, height


def _separate(model: Any, request: dict[str, Any], offsets: list[Any]) -> None:
    first, end, size = request["first"], request["end"], request["size"]
    spans = [
        model.new_fixed_size_interval_var(offset, length, f"span_{number}")
        for number, (offset, length) in enumerate(zip(offsets, size, strict=True))
    ]
    alive: dict[int, list[Any]] = defaultdict(list)
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, span in enumerate(spans):
        for section in range(first[number], end[number]):
            alive[section].append(span)
        alike[first[number], end[number], size[number], request["alignment"][number]].append(number)
    for together in alive.values():
        model.add_no_overlap(together)
    for numbers in alike.values():
        for one, other in pairwise(numbers):
            model.add(offsets[one] + size[one] <= offsets[other])
