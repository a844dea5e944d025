"""One compiled step: its graphs, the choice made for each, and what runs now.

A step that is one graph and ends in a scalar is planned when it is first called. Otherwise each graph first runs with
as little memory as is known; when all graphs of a step are known they are planned together, and compiled again. What
Inductor made is gone through before it runs: where it needs more than the budget, the plan is corrected and compiled
again. On CUDA the first steps are also measured, and a plan that needs more than predicted is corrected too.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from remat.core.budget import Budget, BudgetUnit, format_bytes
from remat.core.results.plan import Plan
from remat.distributed.agreement.agreed import Agreement, Alone
from remat.errors import InfeasibleBudget, PlanMismatch
from remat.inductor.decide import Decider, needs_chunks
from remat.inductor.dry_run.timeline import KernelTimeline
from remat.inductor.dry_run.workspaces import Workspaces
from remat.inductor.fitting import Fitter, Fitting, first_goal
from remat.inductor.graph import ChosenCut, CompiledGraph, Decided, Ready, State, Unplanned, Untraced
from remat.inductor.model.choose import Choice, given, leanest
from remat.inductor.model.compose import Composed, compose
from remat.inductor.model.repeated import choose_repeated, solved
from remat.inductor.modes import settings_of
from remat.inductor.offload import OffloadRequest, compile_with_copies
from remat.inductor.plans import follow, plan_from, problem_of, with_kernels, with_travel
from remat.inductor.recaptured import Recaptured
from remat.inductor.search import Trial, search
from remat.inductor.shapes.open_inputs import OpenInputs
from remat.inductor.winners import Winners
from remat.pytorch.costs.allocations import take_matmul_workspaces
from remat.pytorch.costs.op_costs import device_key
from remat.pytorch.costs.plain_peak import PlainStep
from remat.pytorch.device import total_bytes
from remat.pytorch.host.shared import has_failed, place_for_plans
from remat.pytorch.resident.memory import ResidentMemory
from remat.pytorch.run.breaks import TellsBreaks
from remat.pytorch.run.planning import warn_of_excess, warn_of_several
from remat.pytorch.run.progress import Reporter
from remat.pytorch.run.settings import Allowance, PlanReady, Settings
from remat.pytorch.run.watching.peak_check import PeakCheck
from remat.pytorch.run.watching.step_clock import StepClock


@dataclass(slots=True)
class CompiledSession(TellsBreaks):
    settings: Settings
    owner: ResidentMemory
    agreement: Agreement = field(default_factory=Alone)
    graphs: list[CompiledGraph] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    """The graphs that the step under way has called, in order."""
    planned: tuple[int, ...] | None = None
    """The calls that the plan in use was made for."""
    reporter: Reporter = field(init=False)
    asked: Mapping[str, Any] = field(init=False)
    """Settings of Inductor, by the mode that the user wants."""
    left_out: int = 0
    """Graphs that were captured and run unplanned, each with a warning of its own."""
    broken: bool = False
    """Whether Dynamo has met something in this call that it cannot trace."""
    fixed_because: str = ""
    """Why sizes that change cannot be left open; empty where they can."""
    accumulates: bool = False
    _allowance: Allowance = field(default_factory=Allowance)
    _has_run: bool = False
    """Whether a plan has run under this budget: from then on no budget ends the training."""
    _is_beyond_help: bool = False
    """Whether the leanest plan is in use and known to exceed the budget: what its steps need changes nothing."""
    _arguments: tuple[Sequence[Any], dict[str, Any]] | None = None
    """Of the call under way."""
    _waiting: bool = False
    """Whether the calls of the last step are to be planned together."""
    _plan: Plan | None = None
    _peak_check: PeakCheck = field(default_factory=PeakCheck)
    _clock: StepClock = field(default_factory=StepClock)
    _workspaces: dict[torch.device, Workspaces] = field(default_factory=dict)
    _has_told_of_gaps: bool = False
    _recaptured: Recaptured = field(default_factory=Recaptured)

    def __post_init__(self) -> None:
        self.reporter = Reporter(self.settings.show_progress)
        self.asked = settings_of(self.settings.mode)

    @property
    def plan(self) -> Plan | None:
        """The plan in use, with what its steps take, once the device has said so."""
        plan, seen_ns = self._plan, self._clock.usual_ns()
        if plan is not None and plan.compiled is not None and seen_ns:
            self._plan = replace(plan, compiled=replace(plan.compiled, seen_ns=seen_ns))
        return self._plan

    def begin_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """The step is called: what the last one did is known now."""
        self.broken = False
        # Gradients that are added to are in memory all the time: once that was seen it is planned for.
        starts_adding = self.owner.has_gradients() and not self.accumulates
        self.accumulates |= starts_adding
        # A plan that was given runs as it is.
        called = self._planned_calls() if self.settings.plan is None else ()
        if any(_gets_by(self.graphs[number].state) for number in called) or (called and starts_adding):
            self._plan_next(called)
        elif called and self._plan is not None:
            self._check_step(self._plan)
        self._arguments = args, kwargs
        self.calls.clear()

    def _planned_calls(self) -> tuple[int, ...]:
        """What the last step called, without what turned out to run unplanned."""
        return tuple(number for number in self.calls if not isinstance(self.graphs[number].state, Unplanned))

    def end_call(self) -> None:
        """What a step called is looked at when the next one begins."""
        self._arguments = None

    def abandon_call(self) -> None:
        """The step has raised: what it did says nothing of the next one."""
        self._arguments = None
        self.calls.clear()

    def is_under_way(self) -> bool:
        """Once a call has returned, compiled code needs nothing of the session any more."""
        return False

    def set_budget(self, budget: Budget) -> None:
        """Plan and compile anew at the next step; what was captured and measured stays."""
        self.settings = replace(self.settings, budget=budget, plan=None)
        self._has_run, self._allowance = False, Allowance()
        self._plan_next(None)

    def _plan_next(self, calls: tuple[int, ...] | None) -> None:
        self.planned, self._waiting, self._is_beyond_help = calls, calls is not None, False
        self.calls.clear()
        for graph in self.graphs if calls is None else [self.graphs[number] for number in calls]:
            graph.drop_code()

    def add_graph(
        self,
        module: GraphModule,
        plain: PlainStep,
        device: torch.device,
        *,
        alone: bool,
        opened: OpenInputs | None = None,
    ) -> CompiledGraph:
        """Take in a graph that Dynamo captured."""
        graph = CompiledGraph(self, len(self.graphs), module, plain, device, alone, opened)
        self.graphs.append(graph)
        return graph

    def enter(self, graph: CompiledGraph, inputs: Sequence[Any]) -> None:
        """A graph is about to run: make sure that it is compiled, under a plan where there can be one."""
        if self._waiting and len(self.planned or ()) > 1:
            self._waiting = False
            self._plan_together()
        self.calls.append(graph.number)
        if isinstance(graph.state, Ready):
            return
        self.owner.meet(inputs)
        if self.settings.plan is not None and self._follow(graph, inputs, self.settings.plan):
            return
        if (graph.is_whole_step or self._waiting) and len(self.calls) == 1:
            earlier = None if self._waiting else self._recaptured.find(graph, inputs)
            self._waiting = False
            if earlier is not None:
                graph.form, graph.state, self.planned = earlier.form, earlier.state, (graph.number,)
            else:
                self._compile_first(graph, inputs)
                self._recaptured.note(graph, inputs)
        elif isinstance(graph.state, ChosenCut):
            chosen = graph.state.choice
            made = graph.compile_under(inputs, lambda uncut, rates: Decided(chosen))
            graph.state = replace(made, is_planned=True)
        else:
            graph.state = graph.compile_under(inputs, lambda uncut, rates: Decided(leanest(uncut.joint, rates)))
        self._start_checking(graph.device)

    def leave(self, outputs: Sequence[Any]) -> None:
        """A graph has run: while the step is looked at, its own backward is to be told from others'."""
        if self._peak_check.is_watching or self._clock.is_watching:
            for found in {item.grad_fn for item in outputs if isinstance(item, torch.Tensor)} - {None}:
                found.register_prehook(self._went_back)

    def _went_back(self, gradients: object) -> None:
        self._peak_check.goes_back()
        self._clock.goes_back()

    def _follow(self, graph: CompiledGraph, inputs: Sequence[Any], plan: Plan) -> bool:
        """Run a plan that was made before; where it is for something else, plan for its budget instead."""
        try:
            graph.state = follow(graph, inputs, plan)
        except PlanMismatch as error:
            budget = plan.budget_bytes
            warnings.warn(f"{error} Here the step is planned for the same {format_bytes(budget)}.", stacklevel=2)
            self.settings = replace(self.settings, plan=None, budget=Budget(budget, BudgetUnit.BYTES))
            return False
        self._plan, self._has_run = plan, True
        return True

    def _compile_first(self, graph: CompiledGraph, inputs: Sequence[Any]) -> None:
        """Under the budget; where that does not do, with as little as is known to do, if that fits or training has
        begun.
        """
        resident = self._resident_bytes(graph.device) + graph.further_bytes(inputs)
        budget = self._budget_bytes([graph], resident)
        allowed = budget - resident - self._peak_check.beyond_bytes
        self._is_beyond_help = False
        try:
            made = self._compile_alone(graph, inputs, allowed)
        except InfeasibleBudget as refused:
            if graph.further_bytes(inputs):
                raise
            made = self._compile_leanest(graph, inputs, allowed)
            excess = resident + self._peak_check.beyond_bytes + made.needs.first_bytes - budget
            if excess > 0:
                if not self._has_run or self.settings.raises_later:
                    raise _refusal(budget, excess) from None
                self._go_beyond(refused, excess)
        graph.settle(made.ready)
        self.planned = (graph.number,)
        known, choice = made.ready.known, made.ready.choice
        problem = problem_of(known.joint, known.rates, budget, resident)
        plan = plan_from([graph], [choice], choice, problem, made.needs.steady_bytes, made.step_ns)
        plan = with_travel(plan, self.settings.offload, made.ready.built.away_bytes)
        self._tell_plan([graph], plan, made.needs.timeline)
        self._tell_of_gaps([graph])
        self._has_run = True

    def _compile_leanest(self, graph: CompiledGraph, inputs: Sequence[Any], allowed: int) -> Fitting:
        made = graph.compile_under(inputs, lambda uncut, rates: Decided(leanest(uncut.joint, rates), room_bytes=0))
        return Fitting(made, graph.needs(made, self._workspaces_on(graph.device), allowed))

    def _compile_alone(self, graph: CompiledGraph, inputs: Sequence[Any], allowed: int) -> Fitting:
        """Plan and compile, and again with less where the compiled step needs more than it may."""
        if not graph.form.chunked and needs_chunks(graph, allowed):
            chunked = graph.with_chunks(allowed)
            if chunked is not None:
                graph.take(chunked)
        began = time.monotonic()
        fitter = Fitter(graph, inputs, allowed, self._decider, self._workspaces_on(graph.device))
        away = self._compile_away(fitter)
        if away is not None:
            return away
        made = fitter.fit(self._winners(allowed) if self.settings.search_s > 0 else None)
        if self.settings.search_s > 0:
            made = self._searched(graph, inputs, allowed, made, time.monotonic() - began)
        return made

    def _compile_away(self, fitter: Fitter) -> Fitting | None:
        """With tensors that spend a while on the host, where the user allows it and that is foreseen to be faster: code
        without them would be compiled for nothing then.
        """
        graph, inputs, allowed = fitter.graph, fitter.inputs, fitter.allowed
        place = place_for_plans(self.settings.offload, graph.device)
        if place is None:
            return None
        foreseen, workspaces = fitter.foreseen(), fitter.workspaces
        if isinstance(graph.state, Untraced):
            return None
        asked = OffloadRequest(
            allowed,
            first_goal(graph, allowed),
            partial(self._decider.choose, may_copy=False),
            lambda ready: graph.needs(ready, workspaces, allowed),
        )
        found = compile_with_copies(graph, inputs, place, asked, foreseen)
        return Fitting(*found) if found is not None else None

    def _searched(
        self, graph: CompiledGraph, inputs: Sequence[Any], allowed: int, made: Fitting, taken_s: float
    ) -> Fitting:
        """The fastest that can be found by measurement in the time for it."""
        goal = first_goal(graph, allowed)
        solve = partial(self._decider.choose, budget_bytes=goal)
        trial = Trial(graph, inputs, allowed, goal, self._workspaces_on(graph.device), taken_s)
        best = search(trial, made.ready, made.needs, solve, self._winners(allowed), self.settings.search_s)
        return Fitting(best.ready, best.needs) if best is not None else made

    @property
    def _decider(self) -> Decider:
        return Decider(self.settings, self.reporter)

    def _winners(self, allowed: int) -> Winners:
        device = self.graphs[0].device
        # What else is in memory varies a little from run to run.
        about = round(math.log(max(allowed, 1)) / 0.005)
        return Winners(f"{device_key(device)} {about} {self.settings.solver} {self.settings.seed}")

    def _plan_together(self) -> None:
        """All graphs of a step are known: choose for them under one budget, and have them compiled again."""
        graphs = [self.graphs[number] for number in self.planned or ()]
        if self.settings.offload:
            warn_of_several(len(graphs))
        known = [graph.known for graph in graphs]
        resident = self._resident_bytes(graphs[0].device)
        budget = self._budget_bytes(graphs, resident)
        whole = compose([item.joint for item in known], [item.rates for item in known])
        choice = self._choose_together(graphs, whole, budget, resident + self._peak_check.beyond_bytes)
        parts = [given(item.joint, item.rates, whole.part(call, choice.saved)) for call, item in enumerate(known)]
        for graph, item, part in zip(graphs, known, parts, strict=True):
            graph.state = ChosenCut(item, part)
        problem = problem_of(whole.joint, whole.rates, budget, resident)
        predicted = choice.prediction
        self._tell_plan(graphs, plan_from(graphs, parts, choice, problem, predicted.peak_bytes, predicted.time_ns))
        self._tell_of_gaps(graphs)

    def _choose_together(self, graphs: Sequence[CompiledGraph], whole: Composed, budget: int, there: int) -> Choice:
        """What fits with `there` bytes beside it; the leanest that is known where nothing does."""
        calls = [graph.number for graph in graphs]
        known = [(graph.known.joint, graph.known.rates) for graph in graphs]
        limit_s = self.settings.time_limit_s / solved(calls)
        if len(set(calls)) == len(calls):
            with suppress(InfeasibleBudget):
                return self._decider.choose(whole.joint, whole.rates, budget - there, may_copy=False)
        decider = Decider(replace(self.settings, time_limit_s=limit_s), self.reporter)
        choice = choose_repeated(whole, calls, known, budget - there, partial(decider.choose, may_copy=False))
        excess = there + choice.prediction.peak_bytes - budget
        if excess > 0:
            refusal = _refusal(budget, excess)
            if self.settings.raises_later:
                raise refusal
            # The step was under way before its graphs were all known.
            self._go_beyond(refusal, excess)
        return choice

    def _go_beyond(self, refusal: InfeasibleBudget, excess: int) -> None:
        self._is_beyond_help = True
        warn_of_excess(refusal, excess)

    def _start_checking(self, device: torch.device) -> None:
        """On CUDA the first steps are measured, and with them what the caller's own code needs."""
        if device.type == "cuda":
            torch.cuda.empty_cache()
        self._peak_check.after_planning()
        self._clock.after_planning()

    def _tell_of_gaps(self, graphs: Sequence[CompiledGraph]) -> None:
        """On the CPU nobody measures what the caller's own code needs."""
        if self._has_told_of_gaps or graphs[0].device.type != "cpu" or (len(graphs) == 1 and graphs[0].is_whole_step):
            return
        self._has_told_of_gaps = True
        warnings.warn(
            "What your code needs between the compiled forward and its backward, as a loss outside, is not counted on "
            "the CPU: the step can exceed the budget by that much.",
            stacklevel=3,
        )

    def _check_step(self, plan: Plan) -> None:
        """Where the last step needed more than the budget, plan again with that much less; look at the next one."""
        lost = bool(plan.offload) and has_failed(plan.offload, self.graphs[0].device)
        allowed = plan.budget_bytes if not self._is_beyond_help else sys.maxsize
        if self._peak_check.is_exceeded(allowed) or lost:
            self._plan_next(self._planned_calls())
            return
        self._learn_peak(plan)
        self._peak_check.begin_step(self.graphs[0].device, plan.budget_bytes)
        # Sizes that are left open take another time in every step.
        if all(self.graphs[number].opened is None for number in self._planned_calls()):
            self._clock.begin_step(self.graphs[0].device)

    def _learn_peak(self, plan: Plan) -> None:
        """What runs between compiled graphs, as recurrent layers do, nobody foresees: a step has told."""
        seen, graphs = self._peak_check.seen_bytes, [self.graphs[number] for number in self._planned_calls()]
        is_whole = len(graphs) == 1 and graphs[0].is_whole_step
        if plan.compiled is not None and seen > plan.predicted_peak and not is_whole:
            self._plan = replace(plan, compiled=replace(plan.compiled, peak_bytes=seen))

    def _resident_bytes(self, device: torch.device) -> int:
        """What is there when the step begins, with optimizer state that is still to come, and room for what engines
        gather between the graphs: nobody watches a compiled step there.
        """
        residents, gathered = self.owner.residents(device), self.owner.gathered_room_bytes()
        if device.type != "cuda":
            inputs = self.owner.given(*self._arguments) if self._arguments is not None else {}
            return residents.present_bytes + residents.pending_bytes + gathered + sum(inputs.values())
        take_matmul_workspaces(device)
        torch.cuda.synchronize(device)
        there = torch.cuda.memory_allocated(device) - residents.gathered_bytes
        return there + residents.pending_bytes + gathered

    def _budget_bytes(self, graphs: Sequence[CompiledGraph], resident: int) -> int:
        assert self.settings.budget is not None
        return self._allowance.of(
            self.settings.budget,
            plain_peak_bytes=self._plain_peak_bytes(graphs, resident),
            device_bytes=total_bytes(graphs[0].device),
        )

    def _plain_peak_bytes(self, graphs: Sequence[CompiledGraph], resident: int) -> int:
        """Of plain eager: of the whole step where its code was followed, or each graph on top of what others hold."""
        whole = graphs[0].plain.whole
        if whole is not None:
            return resident + whole.peak_bytes() - whole.resident_bytes
        held = peak = 0
        for graph in graphs:
            peak = max(peak, held + graph.plain.peak_bytes() - graph.plain.resident_bytes)
            held += graph.plain.held_bytes - graph.plain.resident_bytes
        return resident + peak

    def _tell_plan(self, graphs: Sequence[CompiledGraph], made: Plan, timeline: KernelTimeline | None = None) -> None:
        self._plan = replace(
            made,
            plain_peak_bytes=self._plain_peak_bytes(graphs, made.problem.resident_bytes),
            breakdown_bytes=tuple(self.owner.residents(graphs[0].device).bytes_by_class.items()),
        )
        if timeline is not None:
            self._plan = with_kernels(self._plan, graphs[0], timeline)
        if self.settings.stop_after_plan:
            raise PlanReady("The plan is made.")

    def _workspaces_on(self, device: torch.device) -> Workspaces:
        return self._workspaces.setdefault(device, Workspaces(device))


def _refusal(budget: int, excess: int) -> InfeasibleBudget:
    return InfeasibleBudget(
        f"Budget {format_bytes(budget)} is below the {format_bytes(budget + excess)} that the compiled step needs at "
        "least; raise the budget or lower the batch.",
        min_budget=budget + excess,
    )


def _gets_by(state: State) -> bool:
    """Whether code runs that was not made for the budget."""
    return isinstance(state, Ready) and not state.is_planned
