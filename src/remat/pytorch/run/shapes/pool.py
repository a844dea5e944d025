"""Schedules that are known for a graph, whatever its sizes, also from earlier runs.

A schedule of a graph is one at every size; only what it needs and takes changes. So those that were solved for at one
size are tried at others. Kept on disk, one file for each graph, they serve the next run (`core/cache_file.py`: what is
wrong with a file is told once, and its schedules are solved for again).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from remat.core.cache_file import CacheFile
from remat.core.document import Record
from remat.core.files.plan_file import graph_hash
from remat.core.graph import Graph, OpId
from remat.core.problem import LARGEST_BYTES, Costs, Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.core.validate import validate
from remat.errors import FileFormatError, InvalidSchedule

FORMAT, VERSION = "remat-schedules", 1
MOST_KEPT = 64
"""For one graph."""


@dataclass(slots=True)
class SchedulePool:
    """By the graph they are for, the newest last."""

    folder: Path
    _known: dict[str, list[Schedule]] = field(default_factory=dict)

    def of(self, graph: Graph) -> list[Schedule]:
        """What is known; the step as it is always is."""
        return self._of(graph_hash(graph, ()), graph)

    def _of(self, key: str, graph: Graph) -> list[Schedule]:
        if key not in self._known:
            kept = self._file(key).read(lambda record: _decode(record, graph)) or []
            self._known[key] = [plain_schedule(graph), *kept]
        return self._known[key]

    def add(self, graph: Graph, schedule: Schedule, *, keep: bool = True) -> bool:
        """Whether it was new; it is kept on disk, unless it is only for now."""
        key = graph_hash(graph, ())
        known = self._of(key, graph)
        if schedule in known:
            return False
        known.append(schedule)
        if keep:
            file = self._file(key)
            file.update(lambda: _encode([*(file.read(lambda record: _decode(record, graph)) or []), schedule]))
        return True

    def _file(self, key: str) -> CacheFile:
        return CacheFile(self.folder / f"{key[:32]}.json", FORMAT, VERSION, "its schedules are solved for again")


def _encode(schedules: list[Schedule]) -> dict[str, object]:
    return {"schedules": [{"steps": list(item.steps)} for item in dict.fromkeys(schedules)][-MOST_KEPT:]}


def _decode(record: Record, graph: Graph) -> list[Schedule]:
    """Every one of them is checked to be a schedule of the graph."""
    count = len(graph.ops)
    problem = Problem(graph, Costs((0.0,) * count, (0,) * count, (0,) * graph.value_count), LARGEST_BYTES)
    found = []
    for row in record.records("schedules"):
        schedule = Schedule(tuple(map(OpId, row.integers("steps"))))
        if any(step >= count for step in schedule.steps):
            raise FileFormatError(f"{row.where} has an op that the graph has not.")
        try:
            validate(problem, schedule, keep_order=False)
        except InvalidSchedule as error:
            raise FileFormatError(f"{row.where} is no schedule of the graph: {error}") from error
        found.append(schedule)
    return found
