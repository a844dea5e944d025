"""One optimized step: the graphs it captured, the plans made for it, and what runs now.

A step calls its captured graphs in some order (one graph, or several after graph breaks, or one graph twice). The
first time an order is met, each call runs with the least memory Remat knows while what happens between the calls is
watched; at the first backward the whole step is known, and one plan for all its calls is made under one budget.
A step that is one graph and ends in a scalar needs no such look: it is planned before anything runs.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule

from remat.core.budget import Budget
from remat.core.plan import Plan
from remat.core.problem import Costs
from remat.errors import PlanMismatch, RematError
from remat.pipeline import Surroundings, check_fingerprint, fingerprint, lower_plan, make_plan
from remat.pytorch._compat import GraphEnd, Outside, OutsideMeter, break_sentence
from remat.pytorch.capture import storage_bytes
from remat.pytorch.compose import Call
from remat.pytorch.execute import Chosen, Saved, addresses
from remat.pytorch.lower import Lowered
from remat.pytorch.owner import Owner
from remat.pytorch.plain import PlainStep
from remat.pytorch.progress import Reporter
from remat.pytorch.traced import TracedGraph, Variant


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for."""

    budget: Budget | None
    solver: str = "auto"
    time_limit_s: float = 10.0
    seed: int = 0
    plan: Plan | None = None
    """A plan made before, to be run as it is."""
    stop_after_plan: bool = False
    show_progress: bool | None = None


class PlanReady(RematError):
    """Raised instead of running the step when only its plan is wanted."""


Order = tuple[tuple[int, tuple[int, ...]], ...]
"""The variants that a step calls, by key, in the order of their forwards."""


@dataclass(slots=True)
class Observed:
    """One forward call of the step under way."""

    variant: Variant
    saved: weakref.ref[Saved] | None = None
    input_bytes: int = 0
    """Inputs that neither the owner nor an earlier call of the step holds."""
    outside: Outside = field(default_factory=lambda: Outside(0, 0))
    gradients: tuple[int, ...] = ()
    """Storage addresses of the gradients its backward returned."""
    tangents: tuple[int, ...] = ()
    passed_gradients: tuple[tuple[int, int, int], ...] = ()
    """See `Call`."""


@dataclass(frozen=True, slots=True)
class Planned:
    order: Order
    accumulates: bool
    """Gradients of an earlier backward were there when the step began."""
    plan: Plan
    lowered: tuple[Lowered, ...]


@dataclass(slots=True)
class Session:
    settings: Settings
    owner: Owner
    graphs: list[TracedGraph] = field(default_factory=list)
    planned: list[Planned] = field(default_factory=list)
    calls: list[Observed] = field(default_factory=list)
    accumulates: bool = False
    resident_bytes: dict[str, int] = field(default_factory=dict)
    """What was in memory when the step under way began; looked at only while it is not planned."""
    before: Outside = field(default_factory=lambda: Outside(0, 0))
    """What the step allocated before its first graph ran."""
    meter: OutsideMeter = field(default_factory=OutsideMeter)
    reporter: Reporter = field(init=False)
    broken: bool = False
    """Whether Dynamo has met something in this call that it cannot trace."""
    _was_seen_whole: bool = False
    """Whether the unplanned step under way has come to its backward."""

    def __post_init__(self) -> None:
        self.reporter = Reporter(self.settings.show_progress)

    def begin_call(self) -> None:
        """The step is called: what it captures from here on belongs together."""
        self.broken = False
        if not self.planned and self.settings.budget is not None:
            self.meter.start(self.owner.device(), self._note_before)

    def end_call(self) -> None:
        """The step has returned: where nothing was captured there is nothing to wait for."""
        if not self.calls:
            self.meter.stop()

    def _note_before(self, found: Outside) -> None:
        self.before = found

    def note_break(self, end: GraphEnd) -> None:
        """Say once what Dynamo could not trace; calling backward is how a step's forward ends."""
        if not end.is_backward_call:
            self.broken = True
            warnings.warn(f"Not planned, runs as before: {end.reason}", stacklevel=2)

    def note_skipped(self, reasons: Iterable[str]) -> None:
        """Say what Dynamo gave up on where it left a whole function out, so that no graph ends there."""
        for sentence in filter(None, map(break_sentence, () if self.broken else reasons)):
            warnings.warn(f"Not planned, runs as before: {sentence}", stacklevel=3)

    def set_budget(self, budget: Budget) -> None:
        """Plan anew at the next step; what was captured and measured stays."""
        self.settings = replace(self.settings, budget=budget, plan=None)
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
        self.meter.stop()
        if not any(_is_open(call) for call in self.calls):
            self.calls.clear()
            self.accumulates = self.owner.has_gradients()
        variant = graph.variant()
        call = Observed(variant)
        self.calls.append(call)
        return Chosen(self._lowered_for(call, inputs), variant.absent)

    def _lowered_for(self, call: Observed, inputs: Sequence[Any]) -> Lowered:
        order = self._order()
        planned = self._find_planned(order)
        if planned is not None:
            return planned.lowered[len(order) - 1]
        call.input_bytes = self._input_bytes(call.variant, inputs)
        if len(order) == 1:
            self._measured_costs(call.variant)
            self.resident_bytes = self._resident_bytes(call)
        if self.settings.plan is not None:
            return self._use_given(self.settings.plan)
        if (call.variant.is_whole_step or self.settings.stop_after_plan) and len(order) == 1:
            return self._make_plan().lowered[0]
        self._measured_costs(call.variant)
        return call.variant.frugal()

    def _order(self) -> Order:
        return tuple(call.variant.key for call in self.calls)

    def after_forward(self, saved: Saved) -> None:
        call = self.calls[-1]
        call.saved = weakref.ref(saved)
        if not self._is_planned():
            self.meter.start(call.variant.captured.device, lambda found: self._note_outside(call, found))
            weakref.finalize(saved, self._abandon, call)

    def _abandon(self, call: Observed) -> None:
        """The results of a forward were dropped without a backward: stop waiting for it."""
        if not self._was_seen_whole and self.calls and self.calls[-1] is call:
            self.meter.stop()

    def before_backward(self, saved: Saved, tangents: Sequence[Any]) -> None:
        if not self.meter.is_running:
            return
        if not self._was_seen_whole:
            self.meter.mark()
            self._was_seen_whole = True
        call = self._call_of(saved)
        call.tangents = addresses(tangents)
        call.passed_gradients = tuple(
            (tangent, number, other.gradients.index(address))
            for tangent, address in enumerate(call.tangents)
            for number, other in enumerate(self.calls)
            if address and address in other.gradients
        )

    def after_backward(self, saved: Saved) -> Callable[[Sequence[Any]], None] | None:
        """In a step that is still being watched, remember where the gradients went."""
        if not self.meter.is_running:
            return None
        call = self._call_of(saved)

        def note(gradients: Sequence[Any]) -> None:
            call.gradients = addresses(gradients)

        return note

    def _call_of(self, saved: Saved) -> Observed:
        return next(call for call in self.calls if call.saved is not None and call.saved() is saved)

    def _note_outside(self, call: Observed, found: Outside) -> None:
        """What happened outside since `call` is known; after a backward, so is the whole step: it can be planned."""
        call.outside = found
        if self._was_seen_whole:
            self._was_seen_whole = False
            self._make_plan()

    def _is_planned(self) -> bool:
        return self._find_planned(self._order()) is not None

    def _find_planned(self, order: Order) -> Planned | None:
        for planned in reversed(self.planned):
            if planned.accumulates == self.accumulates and planned.order[: len(order)] == order:
                return planned
        return None

    def _make_plan(self) -> Planned:
        calls = self._described_calls()
        surroundings = self._surroundings()
        settings = self.settings
        if settings.budget is None:
            raise PlanMismatch("No budget and no plan for this step; give one of them.")
        with self.reporter.solving() as progress:
            plan = make_plan(
                calls,
                surroundings,
                settings.budget,
                solver=settings.solver,
                time_limit_s=settings.time_limit_s,
                seed=settings.seed,
                progress=progress,
            )
        return self._install(plan, calls)

    def _use_given(self, plan: Plan) -> Lowered:
        calls = self._described_calls()
        if len(plan.fingerprint.graph_hashes) > len(calls):
            return self.calls[-1].variant.frugal()
        check_fingerprint(plan, fingerprint(calls, self._surroundings()))
        return self._install(plan, calls).lowered[-1]

    def _install(self, plan: Plan, calls: Sequence[Call]) -> Planned:
        planned = Planned(self._order(), self.accumulates, plan, lower_plan(plan, calls))
        self.planned.append(planned)
        if calls[0].captured.device.type == "cuda":
            # The step starts from a clean pool, as the prediction does; what measuring left there would not be reused.
            torch.cuda.empty_cache()
        if self.settings.stop_after_plan:
            raise PlanReady("The plan is made.")
        return planned

    def _described_calls(self) -> list[Call]:
        return [
            Call(
                captured=call.variant.captured,
                costs=self._measured_costs(call.variant),
                outside_bytes=call.outside.peak_bytes,
                # What the next call takes as input is counted there.
                retained_bytes=max(0, call.outside.retained_bytes - next_inputs),
                passed_gradients=call.passed_gradients,
            )
            for call, next_inputs in zip(self.calls, [*(call.input_bytes for call in self.calls[1:]), 0], strict=True)
        ]

    def _measured_costs(self, variant: Variant) -> Costs:
        with self.reporter.profiling() as progress:
            return variant.costs(progress)

    def _surroundings(self) -> Surroundings:
        device = self.calls[0].variant.captured.device
        first = self.calls[0]
        resident = {**self.resident_bytes, "inputs": sum(call.input_bytes for call in self.calls)}
        if not first.variant.is_whole_step and device.type == "cpu":
            # On CUDA the allocator has counted it among what others hold.
            resident["outside"] = max(0, self.before.retained_bytes - first.input_bytes)
        return Surroundings(
            resident_bytes=tuple((name, size) for name, size in resident.items() if size),
            plain_peak_bytes=self._plain_peak_bytes(sum(resident.values())),
            device_bytes=_device_bytes(device),
            device=_device_name(device),
            torch_version=str(torch.__version__).split("+")[0],
            shapes=tuple(shape for call in self.calls for shape in _shapes(call.variant)),
        )

    def _resident_bytes(self, first: Observed) -> dict[str, int]:
        """What is in memory before the step's first forward; on CUDA also what the allocator holds for others."""
        device = first.variant.captured.device
        resident = self.owner.resident_bytes(device)
        if device.type == "cuda":
            known = self.owner.present_bytes(device) + first.input_bytes
            resident["other"] = max(0, torch.cuda.memory_allocated(device) - known)
        return resident

    def _plain_peak_bytes(self, resident: int) -> int:
        """The peak of plain eager: each graph's own, on top of what the other graphs hold between their passes."""
        held = [call.variant.held_bytes() for call in self.calls]
        peaks = [call.variant.plain_peak_bytes() + sum(held) - own for call, own in zip(self.calls, held, strict=True)]
        outside = sum(held) + max(call.outside.peak_bytes for call in self.calls)
        return resident + max(outside, *peaks)

    def _input_bytes(self, variant: Variant, inputs: Sequence[Any]) -> int:
        """Bytes of inputs that nobody else counts: not the owner's, not an output of an earlier call."""
        known = self.owner.addresses()
        for call in self.calls:
            saved = call.saved() if call.saved is not None else None
            known |= set(saved.output_addresses) if saved is not None else set()
        device = variant.captured.device
        fresh = {
            int(item.untyped_storage()._cdata): item
            for item in inputs
            if isinstance(item, torch.Tensor) and int(item.untyped_storage()._cdata) not in known
        }
        return sum(storage_bytes(tensor, device) for tensor in fresh.values())


@dataclass(frozen=True, slots=True)
class GraphConductor:
    """Connects one graph's program to its session."""

    session: Session
    graph: TracedGraph

    def before_forward(self, inputs: Sequence[Any]) -> Chosen:
        return self.session.choose(self.graph, inputs)

    def after_forward(self, saved: Saved) -> None:
        self.session.after_forward(saved)

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


def _is_open(call: Observed) -> bool:
    """Whether a call's backward may still come."""
    return call.saved is not None and call.saved() is not None


def _shapes(variant: Variant) -> list[str]:
    return [_describe(node.meta.get("val")) for node in variant.captured.inputs()]


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype)[6:]}{list(value.shape)}"
    return repr(value)


def _device_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _device_name(device: torch.device) -> str:
    return f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"
