"""Search by measurement: candidates are compiled and timed, and the fastest that fits stays.

In: a graph that is compiled under one choice. Out: the same graph under the best one, which is remembered on disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from remat.core.budget import format_bytes
from remat.inductor.candidates import Solve, candidates
from remat.inductor.choose import Choice, given
from remat.inductor.compile import Built
from remat.inductor.graph import CompiledGraph, Needs, Version
from remat.inductor.partition import Uncut
from remat.inductor.predict import Rates
from remat.inductor.trial import time_ns
from remat.inductor.winners import Winner, Winners
from remat.inductor.workspaces import Workspaces

_log = logging.getLogger(__name__)

WORTH_IT = 0.003
"""Of a step's time: times repeat to about this much, so that what is faster by less does not take the place of what
was predicted to be faster."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A graph to try choices on."""

    graph: CompiledGraph
    inputs: Sequence[Any]
    allowed: int
    """The most bytes that it may need."""
    goal: int
    """The most bytes that it should be predicted to need."""
    workspaces: Workspaces
    compile_s: float
    """How long it took to plan and compile it; what would not be ready in time is not begun."""

    def run(self, choice: Choice) -> tuple[Built, Needs, float]:
        """Compile under `choice`: what was made, what it needs, how long it takes if that is allowed."""
        self.graph.compile(self.inputs, lambda uncut, rates: choice)
        return self._result()

    def run_default(self) -> tuple[Built, Needs, float]:
        """The same under what torch would save, of a graph that was not compiled before."""

        def decide(uncut: Uncut, rates: Rates) -> Choice:
            self.graph.saved_by_torch = uncut.saved_by_torch()
            return replace(given(uncut.joint, rates, self.graph.saved_by_torch | uncut.joint.kept), is_default=True)

        self.graph.compile(self.inputs, decide)
        return self._result()

    def _result(self) -> tuple[Built, Needs, float]:
        needs = self.graph.needs(self.workspaces)
        return self._built(), needs, self.time_ns() if needs.fit(self.allowed) else float("inf")

    def time_ns(self) -> float:
        return time_ns(self._built().call, self.inputs, self.graph.device)

    def _built(self) -> Built:
        assert self.graph.built is not None, "a trial has been compiled"
        return self.graph.built


@dataclass(frozen=True, slots=True)
class _Best:
    """The fastest choice so far, with the graph it was made for."""

    time_ns: float
    built: Built
    choice: Choice
    needs: Needs
    name: str
    version: Version

    def better(self, other: _Best) -> _Best:
        return other if other.time_ns < (1 - WORTH_IT) * self.time_ns else self


def search(trial: Trial, needs: Needs, solve: Solve, winners: Winners, seconds: float) -> Needs:
    """Try candidates until `seconds` are over; returns what the best one needs."""
    graph = trial.graph
    assert graph.joint is not None and graph.choice is not None and graph.built is not None
    if winners.load(graph.joint) is not None:
        return needs
    first, until = graph.joint, time.monotonic() + seconds
    best = _tried("what was planned", graph, graph.built, needs, trial.time_ns())
    best = _try_all(trial, best, solve, until)
    if time.monotonic() + trial.compile_s < until and graph.switch_loss(trial.allowed):
        best = best.better(_tried("the other loss", graph, *trial.run_default()))
        best = _try_all(trial, best, solve, until)
    graph.restore(best.version)
    graph.built, graph.choice = best.built, best.choice
    assert graph.joint is not None
    if graph.joint is not first:
        winners.store(first, Winner(frozenset(), best.name, other_loss=True))
    winners.store(graph.joint, Winner(best.choice.saved, best.name, by_solver=best.choice.unrolled is not None))
    return best.needs


def _try_all(trial: Trial, best: _Best, solve: Solve, until: float) -> _Best:
    graph = trial.graph
    assert graph.joint is not None and graph.rates is not None and graph.choice is not None
    tried = {graph.choice.saved}
    for name, choice in candidates(graph.joint, graph.rates, trial.goal, solve, graph.saved_by_torch):
        if time.monotonic() + trial.compile_s > until:
            break
        if choice.saved not in tried:
            tried.add(choice.saved)
            best = best.better(_tried(name, graph, *trial.run(choice)))
    return best


def _tried(name: str, graph: CompiledGraph, built: Built, needs: Needs, time_ns: float) -> _Best:
    assert graph.choice is not None
    _log.info("Tried %s: needs %s, %.2f ms.", name, format_bytes(needs.first_bytes), time_ns / 1e6)
    return _Best(time_ns, built, graph.choice, needs, name, graph.version())
