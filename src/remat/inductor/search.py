"""Search by measurement: candidates are compiled and timed, and the fastest that fits stays.

In: a graph that is compiled under one choice. Out: the best that was tried, which is remembered on disk.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from remat.core.budget import format_bytes
from remat.inductor.dry_run.workspaces import Workspaces
from remat.inductor.graph import CompiledGraph, Decided, Form, Needs, Ready
from remat.inductor.model.candidates import Solve, candidates
from remat.inductor.model.choose import Choice, given
from remat.inductor.model.program import MeasuredRates
from remat.inductor.partition import Uncut
from remat.inductor.trial import time_ns
from remat.inductor.winners import Winner, Winners

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

    def run(self, name: str, choice: Choice) -> Tried:
        """Compile under `choice`."""
        return self._tried(name, self.graph.compile_under(self.inputs, lambda uncut, rates: Decided(choice)))

    def run_default(self, name: str) -> Tried:
        """Compile a form that was not compiled before, under what torch would save."""

        def decide(uncut: Uncut, rates: MeasuredRates) -> Decided:
            saved = uncut.saved_by_torch()
            choice = given(uncut.joint, rates, saved | uncut.joint.kept)
            return Decided(replace(choice, is_default=True), saved)

        return self._tried(name, self.graph.compile_under(self.inputs, decide))

    def _tried(self, name: str, ready: Ready) -> Tried:
        needs = self.graph.needs(ready, self.workspaces, self.allowed)
        return self.timed(name, ready, needs) if needs.fit(self.allowed) else self._told(name, ready, needs, math.inf)

    def timed(self, name: str, ready: Ready, needs: Needs) -> Tried:
        """With how long its code takes."""
        return self._told(name, ready, needs, time_ns(ready.built.call, self.inputs, self.graph.device))

    def _told(self, name: str, ready: Ready, needs: Needs, taken_ns: float) -> Tried:
        _log.info("Tried %s: needs %s, %.2f ms.", name, format_bytes(needs.first_bytes), taken_ns / 1e6)
        return Tried(name, self.graph.form, ready, needs, taken_ns)


@dataclass(frozen=True, slots=True)
class Tried:
    """A choice with the code that was made of it, and of which form of the graph."""

    name: str
    form: Form
    ready: Ready
    needs: Needs
    time_ns: float
    """Infinite where it needs too much."""

    def better(self, other: Tried) -> Tried:
        return other if other.time_ns < (1 - WORTH_IT) * self.time_ns else self


def search(trial: Trial, ready: Ready, needs: Needs, solve: Solve, winners: Winners, seconds: float) -> Tried | None:
    """The best of the candidates that can be tried in `seconds`, with the graph in its form; None where it is known."""
    graph, joint = trial.graph, ready.known.joint
    if winners.load(joint) is not None:
        return None
    first, until = graph.form, time.monotonic() + seconds
    best = trial.timed("what was planned", ready, needs)
    best = _try_all(trial, ready, best, solve, until)
    other = graph.other_form(trial.allowed) if time.monotonic() + trial.compile_s < until else None
    if other is not None:
        graph.take(other)
        default = trial.run_default("the other loss")
        best = _try_all(trial, default.ready, best.better(default), solve, until)
    graph.take(best.form)
    if best.form is not first:
        winners.store(joint, Winner(frozenset(), best.name, other_loss=True))
    choice = best.ready.choice
    winners.store(best.ready.known.joint, Winner(choice.saved, best.name, by_solver=choice.unrolled is not None))
    return best


def _try_all(trial: Trial, ready: Ready, best: Tried, solve: Solve, until: float) -> Tried:
    """The best of the candidates for the form that `ready` was made of, and of what is there already."""
    known = ready.known
    tried = {ready.choice.saved}
    for name, choice in candidates(known.joint, known.rates, trial.goal, solve, known.saved_by_torch):
        if time.monotonic() + trial.compile_s > until:
            break
        if choice.saved not in tried:
            tried.add(choice.saved)
            best = best.better(trial.run(name, choice))
    return best
