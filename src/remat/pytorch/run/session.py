"""One optimized step: the graphs it captured, the plans made for it, and what runs now.

A step calls its captured graphs in some order (one graph, or several after graph breaks, or one graph twice). Until an
order is known, each call runs with the least memory Remat knows: in one step the graphs are captured and their ops
measured, in the next what happens between them is watched, and when its backward ends one plan for all its calls is
made under one budget. A step that is one graph and ends in a scalar needs no such look: it is planned before anything
runs, with its outputs reserved to the end.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from remat.core.budget import Budget, BudgetUnit
from remat.core.problem import Costs
from remat.core.results.plan import Plan
from remat.distributed.agreement.agreed import Agreement, Alone
from remat.distributed.agreement.facts import Facts
from remat.errors import InfeasibleBudget, PlanMismatch
from remat.pipeline import Surroundings, check_fingerprint, fingerprint, predict_again
from remat.pytorch.graph.capture import with_held_tangents
from remat.pytorch.host.shared import has_failed
from remat.pytorch.resident.memory import ResidentMemory
from remat.pytorch.run.breaks import TellsBreaks
from remat.pytorch.run.compose import Call, Outside, Source
from remat.pytorch.run.execute import Chosen, Saved
from remat.pytorch.run.held import HeldForwards
from remat.pytorch.run.lower import Lowered
from remat.pytorch.run.planning import (
    Key,
    Planned,
    Search,
    WatchedStep,
    agreed_plan,
    dropped_in,
    facts_of,
    in_flight_bytes,
    key_of,
    leanest_plan,
    meets_others,
    plain_step_bytes,
    plan_within,
    refuse_what_cannot_fit,
    surroundings_of,
    warn_of_kept_graph,
)
from remat.pytorch.run.plans_again import PlansAgain
from remat.pytorch.run.progress import Reporter
from remat.pytorch.run.settings import Allowance, CaptureReady, PlanReady, Settings
from remat.pytorch.run.shapes.known import AnyGraph
from remat.pytorch.run.shapes.transfer import PlanTransfer
from remat.pytorch.run.variants import Ran, Variant
from remat.pytorch.run.watching.drift import DriftWatch
from remat.pytorch.run.watching.peak_check import PeakCheck
from remat.pytorch.run.watching.step_watch import StepWatch
from remat.within import LeanestSeen

MOST_LOOKS = 8
"""Steps that are watched in wait for a way that was taken once, before it counts as rare."""


@dataclass(slots=True)
class Session(TellsBreaks, PlansAgain):
    settings: Settings
    owner: ResidentMemory
    agreement: Agreement = field(default_factory=Alone)
    graphs: list[AnyGraph] = field(default_factory=list)
    planned: list[Planned] = field(default_factory=list)
    seen: dict[Key, WatchedStep] = field(default_factory=dict)
    """Steps that were watched, for when the budget changes."""
    calls: list[Ran] = field(default_factory=list)
    accumulates: bool = False
    watch: StepWatch = field(init=False)
    dropped: dict[Key, frozenset[Source]] = field(default_factory=dict)
    """Outputs that the caller has dropped early in every step so far."""
    reporter: Reporter = field(init=False)
    left_out: int = 0
    """Graphs that were captured and run unplanned, each with a warning of its own."""
    broken: bool = False
    """Whether Dynamo has met something in this call that it cannot trace."""
    fixed_because: str = ""
    """Why sizes that change cannot be left open; empty where they can."""
    transfer: PlanTransfer = field(default_factory=PlanTransfer)
    kept_graph: int = 0
    """How many backwards of one forward were seen to keep its graph."""
    holds_incoming: bool = False
    """Whether incoming gradients were seen to live to the end of backward: some versions of torch hold them."""
    allowance: Allowance = field(default_factory=Allowance)
    _has_run: bool = False
    """Whether a forward has run under this budget: from then on no budget ends the training."""
    root_calls: int = 0
    """How often the step was called since its first graph: a model may be called twice before backward."""
    _held: HeldForwards = field(default_factory=HeldForwards)
    _leanest: LeanestSeen = field(default_factory=LeanestSeen)
    _peak_check: PeakCheck = field(default_factory=PeakCheck)
    drift: DriftWatch = field(default_factory=DriftWatch)
    _looks: int = 0
    """How many of the next steps are watched from their start: one took a way that is not planned."""

    def __post_init__(self) -> None:
        self.reporter = Reporter(self.settings.show_progress)
        self.watch = StepWatch(self.owner, partial(self.or_give_up, self._plan_watched))

    def begin_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """The step is called: what it captures from here on belongs together."""
        self.broken = False
        self.root_calls = self.root_calls + 1 if self._is_midway() else 1
        self.watch.begin_call(args, kwargs, prepare=lambda: bool(self.or_give_up(self._prepare_to_watch)))

    def _prepare_to_watch(self) -> bool:
        if self.settings.budget is None or (self._has_usable() and not self._looks):
            return False
        if self._is_midway() and not self.watch.is_backward:
            return False  # the step is under way, and nobody saw it begin
        for graph in self.graphs:
            self._measured_costs(graph.variant())
        return bool(self.graphs)

    def _has_usable(self) -> bool:
        """Whether a step that begins with gradients, or without, as the next one does, is planned or can be at once."""
        accumulates = self.owner.has_gradients()
        return any(key[1] == accumulates for key in (*self.seen, *(item.key for item in self.planned)))

    def abandon_call(self) -> None:
        """The step has raised: what it did says nothing of the next one."""
        self.watch.end_call()
        self.watch.look_away()
        self._peak_check.stop()

    def end_call(self) -> None:
        """The step has returned: where nothing was captured there is nothing to wait for."""
        self.watch.end_call()
        if not any(call.is_open for call in self.calls):
            self.watch.look_away()

    def is_under_way(self) -> bool:
        """Whether a backward of the last step runs or may still come."""
        return any(call.is_open or call.is_in_backward for call in self.calls)

    def set_budget(self, budget: Budget) -> None:
        """Plan anew at the next step; what was captured and measured stays."""
        self.settings = replace(self.settings, budget=budget, plan=None)
        self._has_run, self.allowance = False, Allowance()
        self.forget_what_was_solved()
        self.calls.clear()

    def set_plan(self, plan: Plan) -> None:
        """Run `plan` from the next step on; what was captured stays."""
        self.settings = replace(self.settings, budget=None, plan=plan)
        self.forget_plans()
        self.calls.clear()

    def forget_plans(self) -> None:
        """Nothing that was seen of steps so far is true of the next."""
        self.planned.clear()
        self.seen.clear()

    @property
    def plan(self) -> Plan | None:
        """The plan in use: the latest."""
        return self.planned[-1].plan if self.planned else None

    def choose(self, graph: AnyGraph, inputs: Sequence[Any]) -> Chosen:
        """What runs for the forward call that starts now."""
        self.watch.end_gap()
        variant, growth = self.settled(graph, inputs)
        call = Ran(variant, growth=growth)
        if not self._is_midway():
            self.owner.meet(inputs)
            self._begin_step(call.variant)
        elif not call.variant.is_measured:
            self.watch.look_away()
        self.calls.append(call)
        planned = self._find_planned()
        self.watch.before_forward(len(self.calls) - 1, inputs)
        lowered = planned.lowered[len(self.calls) - 1] if planned is not None else self._unplanned(call)
        call.schedule = lowered.schedule
        return Chosen(lowered, call.variant.absent)

    def _is_midway(self) -> bool:
        """Whether a backward of the step may still come; not of a forward that one after it has overtaken."""
        after = max((number for number, call in enumerate(self.calls) if call.went_back), default=0)
        return any(call.is_open for call in self.calls[after:])

    def _begin_step(self, first: Variant) -> None:
        self._check_peak()
        if self._held.set_aside(self.calls, may_plan=self.settings.plan is None):
            self.forget_plans()
        self.calls.clear()
        self.accumulates = self.owner.has_gradients()
        self.plan_again_where_drifted(first, self._usable())
        self._plan_what_was_seen(first)
        self.take_better(first)
        known = [item for item in self._usable() if item.key[0][0] == first.key]
        is_known, device = bool(known), first.captured.device
        can_measure = first.is_measured and (self._looks > 0 or not (is_known or first.is_whole_step))
        self._looks -= is_known and self._looks > 0
        held = self._held.tensors()
        again = any(item.key[0][0][:2] == first.key[:2] for item in self.planned)
        self.watch.begin_step(device, held, is_known=is_known, can_measure=can_measure, again=again)
        self._peak_check.begin_step(device, min((item.allowed_bytes for item in known), default=0))

    def _plan_what_was_seen(self, first: Variant) -> None:
        """Under a budget that has changed since: the step that begins now is known, only not planned."""
        have = {item.key for item in self.planned}
        for key, seen in self.seen.items():
            if key[1] == self.accumulates and key[0][0] == first.key and key not in have:
                self._make_plan(seen)

    def _unplanned(self, call: Ran) -> Lowered:
        if self.settings.stop_after_capture:
            raise CaptureReady("The step is captured.")
        self.agreement.meet(self._facts, is_bound=meets_others(call.variant))
        return self.agreement.unanimous(lambda: self._found(call))

    def _found(self, call: Ran) -> Lowered:
        if self.settings.plan is not None:
            return self._use_given(self.settings.plan)
        if self._is_whole_step() or (self.settings.stop_after_plan and len(self.calls) == 1):
            return self._make_plan(self._as_seen(Outside())).lowered[0]
        if not self.watch.is_measured:
            self._looks = MOST_LOOKS
        self._measured_costs(call.variant)
        self._refuse_what_cannot_fit(call.variant)
        return call.variant.frugal()

    def _refuse_what_cannot_fit(self, variant: Variant) -> None:
        budget = self.settings.budget
        if budget is None or budget.unit is BudgetUnit.PLAIN_FRACTION or self._has_run or len(self.calls) > 1:
            return
        # Copies may bring it within the budget, which is known once the whole step is.
        if self.settings.offload:
            return
        resident = self.watch.total_bytes(is_whole_step=False) + self.agreement.more_bytes()
        refuse = partial(refuse_what_cannot_fit, budget, variant, resident)
        self.agreement.number(("refused", key_of(variant), str(budget)), refuse)

    def _facts(self) -> tuple[Facts, int]:
        facts = facts_of(self.settings, self.calls[0].variant, self.owner.parameter_shapes(), self.agreement.ranks)
        return facts, self.watch.total_bytes(is_whole_step=self._is_whole_step())

    def _is_whole_step(self) -> bool:
        return len(self.calls) == 1 and self.calls[0].variant.is_whole_step

    def _key(self) -> Key:
        return tuple(call.variant.key for call in self.calls), self.accumulates

    def after_forward(self, saved: Saved, outputs: Sequence[Any]) -> None:
        self._has_run = True
        call = self.calls[-1]
        call.saved = weakref.ref(saved)
        self.watch.after_forward(len(self.calls) - 1, call.variant.captured, outputs)
        if self.watch.is_measured:
            weakref.finalize(saved, self._abandon, call)

    def _abandon(self, call: Ran) -> None:
        """The results of a forward were dropped: where no other of the step is left, no backward will come."""
        if any(other is call for other in self.calls) and not any(other.is_open for other in self.calls):
            self.watch.left_without_backward()

    def before_backward(self, saved: Saved, tangents: Sequence[Any]) -> None:
        if saved.kept > self.kept_graph:
            self._plan_for_kept_graph(saved.kept)
        number = self._number_of(saved)
        if number is not None:
            self._peak_check.goes_back()
            sources = self.watch.before_backward(tangents)
            self.calls[number].passed_gradients = tuple(item for item in sources if item[1] > number)

    def _plan_for_kept_graph(self, times: int) -> None:
        """Saved tensors stay in memory after a backward with `retain_graph=True`, which nobody could know before it."""
        self.kept_graph = times
        if self.settings.plan is None:
            self.forget_plans()
        warn_of_kept_graph()

    def after_backward(self, saved: Saved) -> Callable[[Sequence[Any]], None] | None:
        """Whom to tell the gradients, if the call belongs to the step under way."""
        number = self._number_of(saved)
        if number is None:
            return None
        call = self.calls[number]
        call.is_in_backward, captured = True, call.variant.captured

        def note(gradients: Sequence[Any]) -> None:
            call.is_in_backward, call.went_back = False, True
            self.watch.after_backward(number, captured, gradients)
            if number == 0:
                self.drift.end_step()
                self._check_dropped()

        return note

    def _number_of(self, saved: Saved) -> int | None:
        found = (number for number, call in enumerate(self.calls) if call.saved is not None and call.saved() is saved)
        return next(found, None)

    def _ended(self) -> Planned | None:
        """The plan of the step that ends now, if it may be made again."""
        planned = self._find_planned()
        return planned if planned and planned.key == self._key() and self.settings.plan is None else None

    def _check_peak(self) -> None:
        """After a planned step, see whether it needed more than it may."""
        planned = self._ended()
        if planned is None:
            return
        where, device = planned.plan.offload, self.calls[0].variant.captured.device
        if self._peak_check.is_exceeded(planned.allowed_bytes) or (where and has_failed(where, device)):
            self.forget_plans()

    def _check_dropped(self) -> None:
        """At the end of a planned step, see whether the caller held its outputs as the plan takes it."""
        planned = self._ended()
        if planned is None:
            return
        held = self.watch.observer.held(len(self.calls))
        if self._is_whole_step() and not self.kept_graph:
            self._predict_again(planned, frozenset(source for source, gap in held.items() if gap == 0))
            return
        late = {source for source, gap in planned.ending.items() if held.get(source, gap) > gap}
        if late:
            self.dropped[planned.key] -= late
            self.seen.pop(planned.key, None)
            self._looks = MOST_LOOKS
            warnings.warn(
                f"{len(late)} outputs that were dropped in earlier steps were kept in this one, beyond the plan; "
                "the next steps are planned for it.",
                stacklevel=2,
            )

    def _predict_again(self, planned: Planned, dropped: frozenset[Source]) -> None:
        """A plan for a whole step reserves its outputs to the end; what it says of the peak follows the caller."""
        before = self.dropped.get(planned.key, dropped)
        self.dropped[planned.key] = before & dropped
        if planned.ending.keys() != before & dropped:
            gone = dict.fromkeys(sorted(before & dropped), 0)
            passed = self.calls[0].variant.dropped_at_once(gone)
            plan = predict_again(planned.made, self.described_calls(), Outside(passed))
            self.planned[self.planned.index(planned)] = replace(planned, plan=plan, ending=gone)

    def _usable(self) -> list[Planned]:
        """Plans for a step that begins as this one does, the latest first; without those that expect too much."""
        return [item for item in reversed(self.planned) if item.key[1] == self.accumulates and not self._is_late(item)]

    def _is_late(self, planned: Planned) -> bool:
        return self.settings.plan is None and not planned.ending.keys() <= self.dropped.get(planned.key, frozenset())

    def _find_planned(self) -> Planned | None:
        order = self._key()[0]
        return next((item for item in self._usable() if item.key[0][: len(order)] == order), None)

    def _plan_watched(self) -> None:
        """After a backward the whole step is known: it can be planned."""
        if self._find_planned() is not None:
            return
        self._looks = 0
        schedules = [call.schedule for call in self.calls if call.schedule is not None]
        outside = self.watch.outside(self.described_calls(), schedules)
        last = 2 * len(self.calls) - 1
        early = {item.source for item in outside.passed if item.source is not None and item.held < last}
        forwards = {(call, value) for call, value in early if self.calls[call].variant.is_forward(value)}
        self.dropped[self._key()] = frozenset(forwards & self.dropped.get(self._key(), forwards))
        kept = forwards - self.dropped[self._key()]
        passed = (replace(item, held=last) if item.source in kept else item for item in outside.passed)
        seen = self._as_seen(replace(outside, passed=tuple(passed)))
        self.seen[seen.key] = seen
        self._make_plan(seen)

    def _as_seen(self, outside: Outside) -> WatchedStep:
        return WatchedStep(self._key(), self.described_calls(), self._surroundings(outside), outside)

    def _make_plan(self, seen: WatchedStep) -> Planned:
        if self.settings.budget is None:
            raise PlanMismatch("No budget and no plan for this step; give one of them.")
        plain, device = self.largest_plain_bytes(seen), seen.surroundings.device_bytes
        allowed = self.allowance.of(self.settings.budget, plain_peak_bytes=plain, device_bytes=device)
        allowed = min(allowed, self.drift.left_bytes or allowed)
        budget = Budget(allowed, BudgetUnit.BYTES)
        try:
            plan = self._plan_for(seen, budget)
        except InfeasibleBudget as error:
            if not self._has_run or self.settings.stop_after_plan or self.settings.raises_later:
                raise
            plan = leanest_plan(budget, error, partial(self._plan_for, seen))
        return self._install(plan, seen.key, seen.calls, seen.outside)

    def _plan_for(self, seen: WatchedStep, budget: Budget) -> Plan:
        if not self.kept_graph and (known := self.known_plan(seen, budget)) is not None:
            return known
        find = partial(plan_within, budget, Search(self.settings, self.reporter, self.kept_graph, self._leanest))
        key = str(budget), self._shared_key(), self.kept_graph
        return agreed_plan(self.agreement, key, seen, find, in_flight_bytes(self.owner, seen.calls))

    def _shared_key(self) -> object:
        return [key_of(call.variant) for call in self.calls], self.accumulates, self.holds_incoming

    def _use_given(self, plan: Plan) -> Lowered:
        calls = self.described_calls()
        if len(plan.fingerprint.graph_hashes) > len(calls):
            return self.calls[-1].variant.frugal()
        check_fingerprint(plan, fingerprint(calls, self._surroundings(Outside())))
        return self._install(plan, self._key(), calls, Outside()).lowered[-1]

    def _install(self, plan: Plan, key: Key, calls: Sequence[Call], outside: Outside) -> Planned:
        ending = dropped_in(plan, calls, outside, self.dropped[key] if outside.passed else ())
        planned = Planned(key, plan, plan, self.lowered(plan, key, calls), ending)
        self.planned.append(planned)
        self.transfer.learn(planned, self.settings)
        self._peak_check.after_planning()
        if calls[0].captured.device.type == "cuda":
            # The step starts from a clean pool, as the prediction does; what measuring left there would not be reused.
            torch.cuda.empty_cache()
        if self.settings.stop_after_plan:
            raise PlanReady("The plan is made.")
        return planned

    def described_calls(self) -> list[Call]:
        hold = with_held_tangents if self.holds_incoming else lambda captured: captured
        return [
            Call(hold(call.variant.captured), self._measured_costs(call.variant), call.passed_gradients)
            for call in self.calls
        ]

    def _measured_costs(self, variant: Variant) -> Costs:
        with self.reporter.profiling() as progress:
            return variant.costs(progress, partial(self.agreement.costs, key_of(variant)))

    def _surroundings(self, outside: Outside) -> Surroundings:
        resident = self.watch.resident_bytes(len(self.calls), is_whole_step=self._is_whole_step())
        variants = [call.variant for call in self.calls]
        plain = self.agreement.number(
            ("plain", self._shared_key()),
            lambda: plain_step_bytes(variants, sum(resident.values()), outside, is_one_call=self.root_calls == 1),
        )
        if self._is_whole_step():
            # Elsewhere they were in memory when the gaps were measured.
            resident["copies of buffers"] = variants[0].copied_bytes()
        resident["beyond what was foreseen"] = self._peak_check.beyond_bytes
        # The plan is for every shape of its bucket, and this one may be smaller.
        resident["inputs"] = math.ceil(resident.get("inputs", 0) * max(call.growth for call in self.calls))
        return surroundings_of(variants, resident, plain, self.agreement.ranks)
