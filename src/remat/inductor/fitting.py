"""Code for one graph that needs no more than it may.

In: a graph, its inputs, and the bytes that it may add. Out: a `Fitting`. What Inductor made is gone through before it
runs: where it needs too much, less is planned for and it is compiled again. On CUDA its kernels are then timed, and
where their prices make another plan look faster, that one is compiled too, and the faster of the two stays.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from remat.core.budget import format_bytes
from remat.core.garbage import collecting_only_what_is_new
from remat.errors import InfeasibleBudget
from remat.inductor.decide import WORTH_IT, Decider
from remat.inductor.dry_run.workspaces import Workspaces
from remat.inductor.graph import CompiledGraph, Decided, Form, Needs, Ready
from remat.inductor.kernels.clock import TimedKernels
from remat.inductor.kernels.learned import KernelPrices, factors_of
from remat.inductor.model.choose import Choice, given, priced
from remat.inductor.model.program import MeasuredRates
from remat.inductor.partition import Uncut
from remat.inductor.winners import Winners

_log = logging.getLogger(__name__)

CORRECTIONS = 4
"""How often a plan is compiled again because it needs more than was predicted."""
LEAST_CORRECTION = 0.01
"""Of what is planned for: by at least this much a correction lowers it."""
MOST_CORRECTION = 0.1
"""And by at most this much: another plan may be better predicted."""
ROUNDED_UP = 0.01
"""Of what a step may need: what allocators add, libraries when they are first called, and a kernel of a lean plan that
was not foreseen. It costs a thousandth of the step's time; a plan that is just above the budget is compiled again."""

PAYS_OFF_IN = 10_000
"""Steps within which code that is compiled anew has to win back what that takes."""
WITHIN_A_STEP = 1.04
"""A GPU at its power limit lowers its clock: by so much kernels took longer in steps of GPT-2 on an H200 than each by
itself. Steps that are seen say it better."""

OWN_CUT_BEYOND = 0.005
"""Of what a step may need: torch's own cut is tried even where it is predicted to need this much more."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """Code that needs no more than it may."""

    ready: Ready
    needs: Needs
    taken_s: float = 0.0
    """By planning and compiling it."""

    @property
    def time_ns(self) -> float:
        """Of a step: as measured where kernels were, and else as predicted."""
        timed, prediction = self.needs.timed, self.ready.choice.prediction
        if timed is None:
            return prediction.time_ns
        return prediction.alone_ns + fused_ns(timed, self.ready.known.rates)

    @property
    def step_ns(self) -> float:
        """What a step is expected to take, before one was seen."""
        return self.time_ns * (WITHIN_A_STEP if self.needs.timed is not None else 1.0)


def fused_ns(timed: TimedKernels, rates: MeasuredRates) -> float:
    """What generated kernels take in one step; those that could not be timed, by what they read and write."""
    total = sum(kernel.times * (kernel.time_ns + rates.between_ns) for kernel in timed.kernels)
    for call in timed.untimed:
        moved = sum(item.size_bytes for item in call.tensors)
        total += call.times * (rates.kernel_ns + moved / rates.bytes_per_ns)
    return total


def first_goal(graph: CompiledGraph, allowed: int) -> int:
    """What to plan for at first, where a step may add `allowed`: on CUDA, a little less."""
    return allowed - int(ROUNDED_UP * allowed) if graph.device.type == "cuda" else allowed


@dataclass(frozen=True, slots=True)
class Fitter:
    graph: CompiledGraph
    inputs: Sequence[Any]
    allowed: int
    """The most bytes that its code may need."""
    decider: Decider
    workspaces: Workspaces

    def fit(self, winners: Winners | None) -> Fitting:
        """With the loss as a whole or in chunks: by what won before, and else by what fits."""
        for known in (winners, winners, None, None):
            made = self._within(known)
            if isinstance(made, Fitting):
                return made
            self.graph.take(made)
        raise AssertionError("without a winner a loss is cut in chunks once, and never made whole again")

    def foreseen(self) -> Choice | None:
        """What the plan that `fit` begins with would save, which is not compiled; None where nothing fits."""
        goal, found = first_goal(self.graph, self.allowed), list[Decided]()

        def look(uncut: Uncut, rates: MeasuredRates) -> Form:
            decision = self.decider.decide(self.graph, goal, None, uncut, rates)
            if isinstance(decision, Form):
                return decision
            found.append(decision)
            return self.graph.form

        with suppress(InfeasibleBudget):
            for _ in range(2):
                wanted = self.graph.compile(self.inputs, look)
                if found:
                    break
                assert isinstance(wanted, Form), "nothing is compiled"
                self.graph.take(wanted)
        return found[0].choice if found else None

    def _within(self, winners: Winners | None) -> Fitting | Form:
        """Code under a plan that needs at most `allowed`, or the form of the graph that is to be compiled instead."""
        graph, allowed, goal, needed = self.graph, self.allowed, first_goal(self.graph, self.allowed), 0
        decider = replace(self.decider, own_cut_bytes=int((1 + OWN_CUT_BEYOND) * allowed))
        for round in range(CORRECTIONS):
            decide = partial(decider.decide, graph, goal, winners)
            made = self._made(goal, partial(decider.decide_anew, graph, goal) if round else decide)
            if isinstance(made, Form):
                return made
            if made.needs.fit(allowed):
                return self._refined(made, goal)
            needed, predicted = made.needs.first_bytes, made.ready.choice.prediction.peak_bytes
            decider = self.decider
            if predicted <= goal:
                # The next plan may be expected to exceed what is predicted for it by as much.
                share = min(1 - LEAST_CORRECTION, max(1 - MOST_CORRECTION, allowed * predicted / (needed * goal)))
                goal = int(share * goal)
        raise InfeasibleBudget(
            f"The budget leaves {format_bytes(max(allowed, 0))} for this step, and compiled in {CORRECTIONS} ways it "
            f"needs {format_bytes(needed)} or more; give more memory.",
            min_budget=needed,
        )

    def _made(self, goal: int, decide: Any) -> Fitting | Form:
        began = time.perf_counter()
        with collecting_only_what_is_new():
            made = self.graph.compile(self.inputs, decide)
            if isinstance(made, Form):
                return made
            needs = self.graph.needs(made, self.workspaces, self.allowed)
        fitting = Fitting(made, needs, time.perf_counter() - began)
        _log_compiled(goal, fitting, self.allowed)
        return fitting

    def _refined(self, made: Fitting, goal: int) -> Fitting:
        """The same, or what is faster by the prices of the kernels that were timed."""
        if made.needs.timed is None:
            return made
        known = made.ready.known
        factors = factors_of(known.joint, known.rates, made.needs.timed.kernels)
        KernelPrices(self.graph.device).add(factors)
        self.graph.price(factors)
        # What was proven of a choice was proven at the prices that it was found at: these stay with it.
        now = priced(known.joint, self.graph.known.rates, made.ready.choice)
        other = self._faster(now, goal, made.taken_s)
        if other is None:
            return made
        tried = self._made(goal, lambda uncut, rates: Decided(other, room_bytes=goal))
        assert isinstance(tried, Fitting), "a choice leads to code"
        is_better = tried.needs.fit(self.allowed) and tried.time_ns < made.time_ns
        return tried if is_better else made

    def _faster(self, now: Choice, goal: int, compile_s: float) -> Choice | None:
        """What is worth compiling instead, where anything is: not where hardly anything runs again, nor where that
        takes longer than most training gains by it. Torch's own cut is not given up for that.
        """
        if now.solution.gap < WORTH_IT:
            return None
        best = min(self._others(goal), key=lambda choice: choice.prediction.time_ns, default=now)
        gained_ns = now.prediction.time_ns - best.prediction.time_ns
        pays_off = best.is_default or gained_ns * PAYS_OFF_IN >= compile_s * 1e9
        return best if pays_off and gained_ns > WORTH_IT * now.prediction.time_ns else None

    def _others(self, goal: int) -> Iterator[Choice]:
        """Of the solver, and torch's own, at the prices that are known now."""
        joint, rates, saved = self.graph.known.joint, self.graph.known.rates, self.graph.known.saved_by_torch
        with suppress(InfeasibleBudget):
            yield self.decider.choose(joint, rates, goal)
        own = given(joint, rates, saved | joint.kept)
        if saved and own.prediction.peak_bytes <= goal:
            yield replace(own, is_default=True)


def _log_compiled(goal: int, made: Fitting, allowed: int) -> None:
    prediction, needs = made.ready.choice.prediction, made.needs
    _log.info(
        "Planned for %s and compiled in %.1f s: predicted %s and %.2f ms, needs %s, at first %s, and %.2f ms, may need "
        "%s.",
        format_bytes(goal),
        made.taken_s,
        format_bytes(prediction.peak_bytes),
        prediction.time_ns / 1e6,
        format_bytes(needs.steady_bytes),
        format_bytes(needs.first_bytes),
        made.time_ns / 1e6,
        format_bytes(allowed),
    )
