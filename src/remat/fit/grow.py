"""The largest model or batch that trains on what there is: layers, width, batch or sequence.

In: a function from a size to a search, and a size to begin at. Out: a `Growth`. A size fits if the leanest combinations
do, checkpointed per block or planned within the memory there is; the sizes between are found by doubling and halving.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from remat.core.search.largest import largest
from remat.errors import UnknownName
from remat.fit.levers import Recomputation
from remat.fit.outcomes import Prediction
from remat.fit.search import LeverSearch

AXES = {"layers": "depth", "width": "width", "batch": "batch", "sequence": "length"}
"""What can grow, and what factories of models call it."""
TRIED = 3
"""Combinations with the least state that are tried for each size."""


@dataclass(frozen=True, slots=True)
class Growth:
    axis: str
    size: int
    outcome: Prediction
    """Of the leanest combination that trains it."""
    parameters: int

    @property
    def sentence(self) -> str:
        return (
            f"The largest that trains is {self.size} ({self.axis}), {self.parameters / 1e9:.3g} billion parameters: "
            f"{self.outcome.levers.label}."
        )


def check_growth(axis: str) -> str:
    """What factories call it."""
    if axis not in AXES:
        raise UnknownName(f"Nothing called {axis!r} can grow; choose one of {', '.join(AXES)}.")
    return AXES[axis]


def grow(axis: str, search_at: Callable[[int], LeverSearch], start: int, grid: int = 1) -> Growth | None:
    """The largest multiple of `grid` that fits; None where not even that does."""
    seen: dict[int, Prediction | None] = {}

    def fits(size: int) -> bool:
        if size not in seen:
            seen[size] = leanest(search_at(size))
        return seen[size] is not None

    size = largest(fits, start, grid)
    outcome = seen.get(size)
    if not size or outcome is None:
        return None
    search = search_at(size)
    trace = search.evaluator.traces.of(outcome.levers, search.evaluator.layers)
    return Growth(axis, size, outcome, sum(item.count for item in trace.parameters))


def leanest(search: LeverSearch) -> Prediction | None:
    """A combination that fits, of those with the least state and the smallest micro-batch; None where none does."""
    evaluator = search.evaluator
    smallest = min(levers.micro_batch for levers in search.combinations())
    chosen = [levers for levers in search.combinations() if levers.micro_batch == smallest]
    possible = [item for item in map(evaluator.optimistic, chosen) if item.fits]
    for item in sorted(possible, key=lambda item: item.peak_bytes)[:TRIED]:
        budget = evaluator.cluster.capacity_bytes
        found = evaluator.at_once(replace(item.levers, recomputation=Recomputation.PER_BLOCK))
        if found.fits:
            return found
        planned = replace(item.levers, recomputation=Recomputation.PLANNED, budget_bytes=budget)
        found = evaluator.planned(planned)
        if found.fits:
            return found
    return None
