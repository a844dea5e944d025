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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from remat.core.budget import Budget
from remat.core.plan import Plan
from remat.core.problem import Costs, Problem
from remat.errors import PlanMismatch, RematError
from remat.pipeline import Surroundings, check_fingerprint, fingerprint, lower_plan, make_plan
from remat.pytorch._compat import GraphEnd, OutsideMeter
from remat.pytorch.capture import Captured, storage_bytes, tensors_in
from remat.pytorch.compose import Call
from remat.pytorch.execute import Program, Saved
from remat.pytorch.lower import Lowered, lower
from remat.pytorch.owner import Owner
from remat.pytorch.plain import PlainStep
from remat.pytorch.profile import op_key, profile
from remat.pytorch.progress import Reporter


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


@dataclass(slots=True)
class CapturedGraph:
    """One graph of the step and what is known about it."""

    number: int
    captured: Captured
    plain: PlainStep
    is_whole_step: bool
    """Nothing that matters can happen outside: the graph is the whole forward and ends in scalars."""
    shapes: tuple[str, ...]
    costs: Costs | None = None
    frugal: Lowered | None = None


@dataclass(slots=True)
class Observed:
    """One forward call of the step under way."""

    graph: CapturedGraph
    saved: weakref.ref[Saved] | None = None
    input_bytes: int = 0
    """Inputs that neither the owner nor an earlier call of the step holds."""
    outside_bytes: int = 0
    gradients: tuple[int, ...] = ()
    """Storage addresses of the gradients its backward returned."""
    tangents: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Planned:
    order: tuple[int, ...]
    plan: Plan
    lowered: tuple[Lowered, ...]


@dataclass(slots=True)
class Session:
    settings: Settings
    owner: Owner
    graphs: list[CapturedGraph] = field(default_factory=list)
    planned: list[Planned] = field(default_factory=list)
    calls: list[Observed] = field(default_factory=list)
    meter: OutsideMeter = field(default_factory=OutsideMeter)
    reporter: Reporter = field(init=False)
    broken: bool = False
    """Whether Dynamo has met something in this call that it cannot trace."""

    def __post_init__(self) -> None:
        self.reporter = Reporter(self.settings.show_progress)

    def begin_call(self) -> None:
        """The step is called: what it captures from here on belongs together."""
        self.broken = False

    def note_break(self, end: GraphEnd) -> None:
        """Say once what Dynamo could not trace; calling backward is how a step's forward ends."""
        if not end.is_backward_call:
            self.broken = True
            warnings.warn(f"Not planned, runs as before: {end.reason}", stacklevel=2)

    @property
    def plan(self) -> Plan | None:
        """The plan in use: the latest."""
        return self.planned[-1].plan if self.planned else None

    def add_graph(self, captured: Captured, plain: PlainStep, alone: bool) -> Program:
        """Take in a newly captured graph; `alone` says that the step's forward is this graph and nothing else."""
        shapes = tuple(_describe(node.meta.get("val")) for node in captured.inputs())
        whole = alone and all(tensor.numel() <= 1 for node in captured.tangents() for tensor in tensors_in(node.meta["val"]))
        graph = CapturedGraph(len(self.graphs), captured, plain, whole, shapes)
        self.graphs.append(graph)
        return Program(captured, GraphConductor(self, graph))

    def choose(self, graph: CapturedGraph, inputs: Sequence[Any]) -> Lowered:
        """What runs for the forward call that starts now."""
        self._end_outside()
        if not any(_is_open(call) for call in self.calls):
            self.calls.clear()
        call = Observed(graph)
        self.calls.append(call)
        order = tuple(call.graph.number for call in self.calls)
        for planned in reversed(self.planned):
            if planned.order[: len(order)] == order:
                return planned.lowered[len(order) - 1]
        call.input_bytes = self._input_bytes(graph, inputs)
        if self.settings.plan is not None:
            return self._use_given(self.settings.plan, order)
        if (graph.is_whole_step or self.settings.stop_after_plan) and len(order) == 1:
            return self._make_plan(order).lowered[0]
        return self._frugal(graph)

    def after_forward(self, saved: Saved) -> None:
        call = self.calls[-1]
        call.saved = weakref.ref(saved)
        if not self._is_planned():
            self.meter.start(call.graph.captured.device)

    def before_backward(self) -> None:
        self._end_outside()
        if self.calls and not self._is_planned():
            self._make_plan(tuple(call.graph.number for call in self.calls))

    def _end_outside(self) -> None:
        if self.meter.is_running:
            self.calls[-1].outside_bytes = self.meter.stop()

    def _is_planned(self) -> bool:
        order = tuple(call.graph.number for call in self.calls)
        return any(planned.order[: len(order)] == order for planned in self.planned)

    def _make_plan(self, order: tuple[int, ...]) -> Planned:
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
        return self._install(order, plan, calls)

    def _use_given(self, plan: Plan, order: tuple[int, ...]) -> Lowered:
        calls = self._described_calls()
        if len(plan.fingerprint.graph_hashes) == len(calls):
            check_fingerprint(plan, fingerprint(calls, self._surroundings()))
            return self._install(order, plan, calls).lowered[-1]
        return self._frugal(self.calls[-1].graph)

    def _install(self, order: tuple[int, ...], plan: Plan, calls: Sequence[Call]) -> Planned:
        planned = Planned(order, plan, lower_plan(plan, calls))
        self.planned.append(planned)
        if self.settings.stop_after_plan:
            raise PlanReady("The plan is made.")
        return planned

    def _described_calls(self) -> list[Call]:
        return [Call(call.graph.captured, self._costs(call.graph), call.outside_bytes) for call in self.calls]

    def _costs(self, graph: CapturedGraph) -> Costs:
        if graph.costs is None:
            with self.reporter.profiling() as progress:
                graph.costs = profile(graph.captured, progress)
        return graph.costs

    def _frugal(self, graph: CapturedGraph) -> Lowered:
        """The schedule with the smallest peak known, for a call whose surroundings are not known yet."""
        if graph.frugal is None:
            from remat.solvers.floor import squeeze

            problem = Problem(graph.captured.graph, self._costs(graph), budget_bytes=0)
            graph.frugal = lower(graph.captured, squeeze(problem).schedule())
        return graph.frugal

    def _surroundings(self) -> Surroundings:
        device = self.calls[0].graph.captured.device
        resident = {**self.owner.resident_bytes(device)}
        resident["inputs"] = resident.get("inputs", 0) + sum(call.input_bytes for call in self.calls)
        return Surroundings(
            resident_bytes=tuple((name, size) for name, size in resident.items() if size),
            plain_peak_bytes=self._plain_peak_bytes(sum(resident.values())),
            device_bytes=_device_bytes(device),
            device=_device_name(device),
            torch_version=str(torch.__version__).split("+")[0],
            shapes=tuple(shape for call in self.calls for shape in call.graph.shapes),
        )

    def _plain_peak_bytes(self, resident: int) -> int:
        """The peak of plain eager: each graph's own, on top of what the other graphs hold between their passes."""
        held = [call.graph.plain.held_bytes - call.graph.plain.resident_bytes for call in self.calls]
        own = [
            call.graph.plain.peak_bytes(self._workspace(call.graph)) - call.graph.plain.resident_bytes
            for call in self.calls
        ]
        outside = sum(held) + max(call.outside_bytes for call in self.calls)
        return resident + max(outside, *(peak + sum(held) - mine for peak, mine in zip(own, held, strict=True)))

    def _workspace(self, graph: CapturedGraph) -> dict[str, int]:
        sizes = self._costs(graph).workspace_bytes
        nodes = graph.captured.op_nodes
        return {op_key(node): size for node, size in zip(nodes, sizes, strict=True) if node is not None and size}

    def _input_bytes(self, graph: CapturedGraph, inputs: Sequence[Any]) -> int:
        """Bytes of inputs that nobody else counts: not the owner's, not an output of an earlier call."""
        known = self.owner.addresses()
        for call in self.calls:
            saved = call.saved() if call.saved is not None else None
            known |= set(saved.output_addresses) if saved is not None else set()
        device = graph.captured.device
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
    graph: CapturedGraph

    def before_forward(self, inputs: Sequence[Any]) -> Lowered:
        return self.session.choose(self.graph, inputs)

    def after_forward(self, saved: Saved) -> None:
        self.session.after_forward(saved)

    def before_backward(self) -> None:
        self.session.before_backward()


def _is_open(call: Observed) -> bool:
    """Whether a call's backward may still come."""
    return call.saved is not None and call.saved() is not None


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

