"""One optimized step: the graphs it captured, the plans made for it, and what runs now.

A step calls its captured graphs in some order (one graph, or several after graph breaks, or one graph twice). Until an
order is known, each call runs with the least memory Remat knows: in one step the graphs are captured and their ops
measured, in the next what happens between them is watched, and when its backward ends one plan for all its calls is
made under one budget. A step that is one graph and ends in a scalar needs no such look: it is planned before anything
runs, with its outputs reserved to the end.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule

from remat.core.budget import Budget, Count
from remat.core.graph import ValueId
from remat.core.plan import Plan
from remat.core.problem import Costs
from remat.core.schedule import Schedule
from remat.errors import PlanMismatch, RematError
from remat.pipeline import Surroundings, check_fingerprint, fingerprint, lower_plan, make_plan, predict_again
from remat.pytorch.breaks import TellsBreaks
from remat.pytorch.compose import Call, Outside, Passed, Source, compose
from remat.pytorch.execute import Chosen, Saved
from remat.pytorch.lower import Lowered
from remat.pytorch.owner import Owner
from remat.pytorch.plain import PlainStep
from remat.pytorch.progress import Reporter
from remat.pytorch.settle import last_gaps, level_bytes
from remat.pytorch.traced import TracedGraph, Variant
from remat.pytorch.watch import StepWatch

MOST_LOOKS = 8
"""Steps that are watched in wait for a way that was taken once, before it counts as rare."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for."""

    budget: Budget | None
    solver: str = "auto"
    time_limit_s: float = 10.0
    seed: int = 0
    plan: Plan | None = None
    """A plan made before, to be run as it is."""
    counts: Count = Count.LIVE
    """What the budget bounds."""
    search_s: float = 0.0
    """Seconds in which compiled candidates may be timed against each other."""
    stop_after_capture: bool = False
    stop_after_plan: bool = False
    show_progress: bool | None = None


class CaptureReady(RematError):
    """Raised instead of running the step when only its first graph is wanted."""


class PlanReady(RematError):
    """Raised instead of running the step when only its plan is wanted."""


Order = tuple[tuple[int, tuple[int, ...]], ...]
"""The variants that a step calls, by key, in the order of their forwards."""


Key = tuple[Order, bool]
"""An order, and whether gradients of an earlier backward were there when the step began."""


@dataclass(slots=True)
class Ran:
    """One forward call of the step under way."""

    variant: Variant
    schedule: Schedule | None = None
    saved: weakref.ref[Saved] | None = None
    passed_gradients: tuple[tuple[int, int, ValueId], ...] = ()
    """See `Call`."""


@dataclass(frozen=True, slots=True)
class Planned:
    key: Key
    made: Plan
    """As the solver left it."""
    plan: Plan
    """With the peak that goes with how the caller holds its outputs."""
    lowered: tuple[Lowered, ...]
    ending: Mapping[Source, int]
    """Outputs that the plan takes the caller to drop before the step ends, and the last gap in which each is held."""


@dataclass(slots=True)
class Session(TellsBreaks):
    settings: Settings
    owner: Owner
    graphs: list[TracedGraph] = field(default_factory=list)
    planned: list[Planned] = field(default_factory=list)
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
    _looks: int = 0
    """How many of the next steps are watched from their start: one took a way that is not planned."""

    def __post_init__(self) -> None:
        self.reporter = Reporter(self.settings.show_progress)
        self.watch = StepWatch(self.owner, self._plan_watched)

    def begin_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """The step is called: what it captures from here on belongs together."""
        self.broken = False
        self.watch.begin_call(args, kwargs, prepare=self._prepare_to_watch)

    def _prepare_to_watch(self) -> bool:
        if self.settings.budget is None or (self.planned and not self._looks):
            return False
        for graph in self.graphs:
            self._measured_costs(graph.variant())
        return bool(self.graphs)

    def abandon_call(self) -> None:
        """The step has raised: what it did says nothing of the next one."""
        self.watch.look_away()

    def end_call(self) -> None:
        """The step has returned: where nothing was captured there is nothing to wait for."""
        if not any(_is_open(call) for call in self.calls):
            self.watch.look_away()

    def set_budget(self, budget: Budget) -> None:
        """Plan anew at the next step; what was captured and measured stays."""
        self.settings = replace(self.settings, budget=budget, plan=None)
        self.planned.clear()
        self.calls.clear()

    def set_plan(self, plan: Plan) -> None:
        """Run `plan` from the next step on; what was captured stays."""
        self.settings = replace(self.settings, budget=None, plan=plan)
        self.planned.clear()
        self.calls.clear()

    @property
    def plan(self) -> Plan | None:
        """The plan in use: the latest."""
        return self.planned[-1].plan if self.planned else None

    def add_graph(
        self, joint: GraphModule, num_forward_outputs: int, plain: PlainStep, *, alone: bool, breaks_off: bool
    ) -> TracedGraph:
        """Take in a newly traced graph; see `TracedGraph`."""
        graph = TracedGraph(len(self.graphs), joint, num_forward_outputs, plain, alone, breaks_off)
        self.graphs.append(graph)
        return graph

    def choose(self, graph: TracedGraph, inputs: Sequence[Any]) -> Chosen:
        """What runs for the forward call that starts now."""
        self.watch.end_gap()
        call = Ran(graph.variant())
        if not any(_is_open(other) for other in self.calls):
            self._begin_step(call.variant)
        elif not call.variant.is_measured:
            self.watch.look_away()
        self.calls.append(call)
        planned = self._find_planned()
        self.watch.before_forward(len(self.calls) - 1, inputs)
        lowered = planned.lowered[len(self.calls) - 1] if planned is not None else self._unplanned(call)
        call.schedule = lowered.schedule
        return Chosen(lowered, call.variant.absent)

    def _begin_step(self, first: Variant) -> None:
        self.calls.clear()
        self.accumulates = self.owner.has_gradients()
        is_known = any(item.key[0][0] == first.key for item in self._usable())
        can_measure = first.is_measured and (self._looks > 0 or not (is_known or first.is_whole_step))
        self._looks -= is_known and self._looks > 0
        self.watch.begin_step(first.captured.device, is_known=is_known, can_measure=can_measure)

    def _unplanned(self, call: Ran) -> Lowered:
        if self.settings.stop_after_capture:
            raise CaptureReady("The step is captured.")
        if self.settings.plan is not None:
            return self._use_given(self.settings.plan)
        if self._is_whole_step() or (self.settings.stop_after_plan and len(self.calls) == 1):
            return self._make_plan(Outside()).lowered[0]
        if not self.watch.is_measured:
            self._looks = MOST_LOOKS
        self._measured_costs(call.variant)
        return call.variant.frugal()

    def _is_whole_step(self) -> bool:
        return len(self.calls) == 1 and self.calls[0].variant.is_whole_step

    def _key(self) -> Key:
        return tuple(call.variant.key for call in self.calls), self.accumulates

    def after_forward(self, saved: Saved, outputs: Sequence[Any]) -> None:
        call = self.calls[-1]
        call.saved = weakref.ref(saved)
        self.watch.after_forward(len(self.calls) - 1, call.variant.captured, outputs)
        if self.watch.is_measured:
            weakref.finalize(saved, self._abandon, call)

    def _abandon(self, call: Ran) -> None:
        """The results of a forward were dropped, maybe without a backward: then stop waiting for it."""
        if self.calls and self.calls[-1] is call:
            self.watch.left_without_backward()

    def before_backward(self, saved: Saved, tangents: Sequence[Any]) -> None:
        number = self._number_of(saved)
        if number is not None:
            sources = self.watch.before_backward(tangents)
            self.calls[number].passed_gradients = tuple(item for item in sources if item[1] > number)

    def after_backward(self, saved: Saved) -> Callable[[Sequence[Any]], None] | None:
        """Whom to tell the gradients, if the call belongs to the step under way."""
        number = self._number_of(saved)
        if number is None:
            return None
        captured = self.calls[number].variant.captured

        def note(gradients: Sequence[Any]) -> None:
            self.watch.after_backward(number, captured, gradients)
            if number == 0:
                self._check_dropped()

        return note

    def _number_of(self, saved: Saved) -> int | None:
        found = (number for number, call in enumerate(self.calls) if call.saved is not None and call.saved() is saved)
        return next(found, None)

    def _check_dropped(self) -> None:
        """At the end of a planned step, see whether the caller held its outputs as the plan takes it."""
        planned = self._find_planned()
        if planned is None or planned.key != self._key() or self.settings.plan is not None:
            return
        held = self.watch.observer.held(len(self.calls))
        if self._is_whole_step():
            self._predict_again(planned, frozenset(source for source, gap in held.items() if gap == 0))
            return
        late = {source for source, gap in planned.ending.items() if held.get(source, gap) > gap}
        if late:
            self.dropped[planned.key] -= late
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
            sizes = self.calls[0].variant.captured.size_bytes
            gone = dict.fromkeys(sorted(before & dropped), 0)
            passed = tuple(Passed(sizes[value], born=0, held=0, source=(call, value)) for call, value in gone)
            plan = predict_again(planned.made, self._described_calls(), Outside(passed))
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
        outside = self.watch.outside(self._described_calls(), schedules)
        last = 2 * len(self.calls) - 1
        early = {item.source for item in outside.passed if item.source is not None and item.held < last}
        forwards = {(call, value) for call, value in early if self._is_forward(call, value)}
        self.dropped[self._key()] = frozenset(forwards & self.dropped.get(self._key(), forwards))
        kept = forwards - self.dropped[self._key()]
        passed = (replace(item, held=last) if item.source in kept else item for item in outside.passed)
        self._make_plan(replace(outside, passed=tuple(passed)))

    def _is_forward(self, call: int, value: ValueId) -> bool:
        captured = self.calls[call].variant.captured
        return captured.graph.producers()[value] < captured.boundary

    def _make_plan(self, outside: Outside) -> Planned:
        calls, settings = self._described_calls(), self.settings
        surroundings = self._surroundings(outside)
        if settings.budget is None:
            raise PlanMismatch("No budget and no plan for this step; give one of them.")
        with self.reporter.solving() as progress:
            plan = make_plan(
                calls,
                surroundings,
                settings.budget,
                outside=outside,
                solver=settings.solver,
                time_limit_s=settings.time_limit_s,
                seed=settings.seed,
                counts=settings.counts,
                progress=progress,
            )
        return self._install(plan, calls, outside)

    def _use_given(self, plan: Plan) -> Lowered:
        calls = self._described_calls()
        if len(plan.fingerprint.graph_hashes) > len(calls):
            return self.calls[-1].variant.frugal()
        check_fingerprint(plan, fingerprint(calls, self._surroundings(Outside())))
        return self._install(plan, calls, Outside()).lowered[-1]

    def _install(self, plan: Plan, calls: Sequence[Call], outside: Outside) -> Planned:
        lowered, key = lower_plan(plan, calls), self._key()
        ending: Mapping[Source, int] = {}
        if plan.schedule is not None and outside.passed:
            ending = last_gaps(compose(calls, outside), plan.schedule, self.dropped[key])
        planned = Planned(key, plan, plan, lowered, ending)
        self.planned.append(planned)
        if calls[0].captured.device.type == "cuda":
            # The step starts from a clean pool, as the prediction does; what measuring left there would not be reused.
            torch.cuda.empty_cache()
        if self.settings.stop_after_plan:
            raise PlanReady("The plan is made.")
        return planned

    def _described_calls(self) -> list[Call]:
        return [
            Call(call.variant.captured, self._measured_costs(call.variant), call.passed_gradients)
            for call in self.calls
        ]

    def _measured_costs(self, variant: Variant) -> Costs:
        with self.reporter.profiling() as progress:
            return variant.costs(progress)

    def _surroundings(self, outside: Outside) -> Surroundings:
        first = self.calls[0].variant
        device = first.captured.device
        resident = self.watch.resident_bytes(len(self.calls), is_whole_step=self._is_whole_step())
        return Surroundings(
            resident_bytes=tuple((name, size) for name, size in resident.items() if size),
            plain_peak_bytes=self._plain_peak_bytes(sum(resident.values()), outside),
            device_bytes=total_device_bytes(device),
            device=device_name(device),
            torch_version=str(torch.__version__).split("+")[0],
            shapes=tuple(shape for call in self.calls for shape in _shapes(call.variant)),
        )

    def _plain_peak_bytes(self, resident: int, outside: Outside) -> int:
        """The peak of plain eager: of each graph and each gap, on top of what earlier graphs and the caller hold."""
        held = [call.variant.held_bytes() for call in self.calls]
        peaks = [call.variant.plain_peak_bytes() for call in self.calls]
        count = len(held)
        found = [0]
        for number, peak in enumerate(peaks):
            levels = (level_bytes(outside, gap) for gap in (number - 1, 2 * count - 2 - number))
            found.append(sum(held[:number]) + peak + max(levels))
        for gap, need in enumerate(outside.workspace_bytes or (0,) * count):
            waiting = held[: min(gap + 1, 2 * count - 1 - gap)]
            found.append(sum(waiting) + need + level_bytes(outside, gap))
        return resident + max(found)


@dataclass(frozen=True, slots=True)
class GraphConductor:
    """Connects one graph's program to its session."""

    session: Session
    graph: TracedGraph

    def before_forward(self, inputs: Sequence[Any]) -> Chosen:
        return self.session.choose(self.graph, inputs)

    def after_forward(self, saved: Saved, outputs: Sequence[Any]) -> None:
        self.session.after_forward(saved, outputs)

    def before_backward(self, saved: Saved, tangents: Sequence[Any]) -> None:
        self.graph.saw(frozenset(number for number, tangent in enumerate(tangents) if tangent is None))
        self.session.before_backward(saved, tangents)

    def after_backward(self, saved: Saved) -> Callable[[Sequence[Any]], None] | None:
        return self.session.after_backward(saved)

    def surprised(self) -> tuple[Lowered, frozenset[int]]:
        variant = self.graph.variant()
        warnings.warn(
            "An output that mostly has no gradient received one: this backward ran its forward again, beyond the "
            "budget; the next step is planned for it.",
            stacklevel=2,
        )
        return variant.keep_all(), variant.absent


def _is_open(call: Ran) -> bool:
    """Whether a call's backward may still come."""
    return call.saved is not None and call.saved() is not None


def _shapes(variant: Variant) -> list[str]:
    return [_describe(node.meta.get("val")) for node in variant.captured.inputs()]


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype)[6:]}{list(value.shape)}"
    return repr(value)


def total_device_bytes(device: torch.device) -> int:
    """The memory of the device, which shares such as "80%" are of."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_name(device: torch.device) -> str:
    """As plans and reports call it."""
    return f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"
