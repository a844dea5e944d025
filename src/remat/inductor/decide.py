"""What to save of a graph that Inductor is about to cut.

In: a captured graph, its joint graph, what its kernels cost, and the bytes that it should be predicted to need. Out: a
`Decided`, or the form of the graph that is to be compiled instead: its loss in chunks, or as a whole again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from remat.core.garbage import collecting_only_what_is_new
from remat.errors import InfeasibleBudget
from remat.inductor.graph import CompiledGraph, Decided, Form
from remat.inductor.model.choose import Choice, choose, given
from remat.inductor.model.joint import Joint
from remat.inductor.model.program import MeasuredRates
from remat.inductor.partition import Uncut
from remat.inductor.stages import stage
from remat.inductor.winners import Winners
from remat.pytorch.run.progress import Reporter
from remat.pytorch.run.settings import Settings

WORTH_IT = 0.01
"""Of a step's predicted time: what is faster than torch's own cut by less is not worth leaving that."""
AS_FAST = 0.005
"""The same: what is slower by no more is taken instead where torch's own cut is likely to need too much."""
HOPELESS_SHARE = 0.3
"""Of what plain eager adds: torch's own cut has never been seen to get by with so little."""
BEYOND_WITH_IMAGES = 0.03
"""Of what is predicted: by how much code for images was often seen to exceed it, since casts of them are made early."""

CHUNKED_SHARE = 0.5
"""The same, of a loss as a whole on a GPU: where a step may add less it is not even traced so."""


def needs_chunks(graph: CompiledGraph, allowed: int) -> bool:
    """Whether a step that may add `allowed` has its loss in chunks, if it has one to be cut."""
    share = CHUNKED_SHARE if graph.device.type == "cuda" else 0.0
    return allowed < share * (graph.plain.live_peak_bytes - graph.plain.resident_bytes)


@dataclass(frozen=True, slots=True)
class Decider:
    settings: Settings
    reporter: Reporter
    own_cut_bytes: int = 0
    """Torch's own cut may be predicted to need this much, where that is more than the goal."""

    def decide(
        self, graph: CompiledGraph, goal: int, winners: Winners | None, uncut: Uncut, rates: MeasuredRates
    ) -> Decided | Form:
        """What won before, where something did, and else what is predicted to be fastest within `goal` bytes."""
        known = winners.load(uncut.joint) if winners is not None else None
        if known is None:
            return self._decide_carefully(graph, goal, uncut, rates)
        other = graph.other_form(goal) if known.other_loss else None
        if other is not None:
            return other
        if known.by_solver:
            return Decided(self.choose(uncut.joint, rates, goal), room_bytes=goal)
        return Decided(given(uncut.joint, rates, known.saved), room_bytes=goal)

    def _decide_carefully(self, graph: CompiledGraph, goal: int, uncut: Uncut, rates: MeasuredRates) -> Decided | Form:
        """Code that needs more than it may is compiled again: where that is likely, a little is left free."""
        saved = _saved_by_torch(graph, goal, uncut)
        if any("convolution_backward" in node.target for node in uncut.joint.nodes):
            try:
                return self._decided(graph, int((1 - BEYOND_WITH_IMAGES) * goal), uncut, rates, saved)
            except InfeasibleBudget as refused:
                if refused.min_budget > goal:
                    raise
        return self._decided(graph, goal, uncut, rates, saved)

    def decide_anew(self, graph: CompiledGraph, goal: int, uncut: Uncut, rates: MeasuredRates) -> Decided | Form:
        """Whatever won before."""
        return self._decided(graph, goal, uncut, rates, _saved_by_torch(graph, goal, uncut))

    def _decided(
        self, graph: CompiledGraph, goal: int, uncut: Uncut, rates: MeasuredRates, saved: frozenset[int] | None
    ) -> Decided | Form:
        """The solver's, or torch's own cut where that fits and is hardly slower; where not, the loss may be chunked."""
        if saved is not None:
            default = given(uncut.joint, rates, saved | uncut.joint.kept)
            if default.prediction.peak_bytes <= max(goal, self.own_cut_bytes):
                return Decided(self._faster(replace(default, is_default=True), uncut.joint, rates, goal), saved, goal)
        chunked = graph.with_chunks(goal) if not graph.form.chunked else None
        if chunked is not None:
            return chunked
        return Decided(self.choose(uncut.joint, rates, goal), saved or frozenset(), goal)

    def _faster(self, default: Choice, joint: Joint, rates: MeasuredRates, goal: int) -> Choice:
        """The solver's choice, where it is worth leaving one that fits as well, or that may not."""
        try:
            own = self.choose(joint, rates, goal)
        except InfeasibleBudget:
            # What the solver knows of fits nowhere, but torch's cut does.
            return default
        share = 1 - WORTH_IT if default.prediction.peak_bytes <= goal else 1 + AS_FAST
        return own if own.prediction.time_ns < share * default.prediction.time_ns else default

    def choose(
        self,
        joint: Joint,
        rates: MeasuredRates,
        budget_bytes: int,
        *,
        may_copy: bool = True,
        saved_bytes: int | None = None,
    ) -> Choice:
        """The solver's choice, as the user asked for it."""
        with self.reporter.solving(), collecting_only_what_is_new():
            return choose(
                joint,
                rates,
                budget_bytes,
                solver=self.settings.solver,
                time_limit_s=self.settings.time_limit_s,
                may_copy=may_copy,
                saved_bytes=saved_bytes,
            )


def _saved_by_torch(graph: CompiledGraph, goal: int, uncut: Uncut) -> frozenset[int] | None:
    """None where torch's own cut is not even looked at."""
    if goal < HOPELESS_SHARE * (graph.plain.live_peak_bytes - graph.plain.resident_bytes):
        return None
    if graph.known.saved_by_torch:
        return graph.known.saved_by_torch
    with stage("Torch's own cut"):
        return uncut.saved_by_torch()
