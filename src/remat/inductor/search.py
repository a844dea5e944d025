"""Search by measurement: candidates are compiled and timed, and the fastest that fits stays.

In: a graph that is compiled under one choice. Out: the same graph under the best one, which is remembered on disk.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from remat.inductor.candidates import Solve, candidates
from remat.inductor.choose import Choice
from remat.inductor.compile import Built
from remat.inductor.graph import CompiledGraph
from remat.inductor.trial import time_ns
from remat.inductor.winners import Winner, Winners
from remat.inductor.workspaces import Workspaces


@dataclass(frozen=True, slots=True)
class Trial:
    """A graph to try choices on."""

    graph: CompiledGraph
    inputs: Sequence[Any]
    allowed: int
    """The most bytes that it may need."""
    workspaces: Workspaces

    def run(self, choice: Choice) -> tuple[Built, int, float]:
        """Compile under `choice`: what was made, what it needs, how long it takes if that is allowed."""
        self.graph.compile(self.inputs, lambda uncut, rates: choice)
        needed = self.graph.needed_bytes(self.workspaces)
        return self._built(), needed, self.time_ns() if needed <= self.allowed else float("inf")

    def time_ns(self) -> float:
        return time_ns(self._built().call, self.inputs, self.graph.device)

    def _built(self) -> Built:
        assert self.graph.built is not None, "a trial has been compiled"
        return self.graph.built


def search(trial: Trial, needed: int, solve: Solve, winners: Winners, seconds: float) -> int:
    """Try candidates until `seconds` are over; returns what the best one needs."""
    graph = trial.graph
    assert graph.joint is not None and graph.rates is not None and graph.choice is not None and graph.built is not None
    if winners.load(graph.joint) is not None:
        return needed
    until = time.monotonic() + seconds
    best = trial.time_ns(), graph.built, graph.choice, needed, "first"
    tried = {graph.choice.saved}
    for name, choice in candidates(graph.joint, graph.rates, trial.allowed, solve, graph.saved_by_torch):
        if time.monotonic() > until:
            break
        if choice.saved not in tried:
            tried.add(choice.saved)
            built, size, taken = trial.run(choice)
            best = min(best, (taken, built, choice, size, name), key=lambda item: item[0])
    _, graph.built, graph.choice, needed, name = best
    winners.store(graph.joint, Winner(graph.choice.saved, name))
    return needed
