"""One compiled step: its graphs, the choice made for each, and what runs now.

A step that is one graph and ends in a scalar is planned when it is first called. Otherwise each graph first runs with as
little memory as is known; when all graphs of a step are known they are planned together, and compiled again. What
Inductor made is gone through before it runs: where it needs more than was predicted, the plan is corrected and
compiled again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from remat.core.plan import Fingerprint, Plan
from remat.core.problem import LARGEST, Problem
from remat.errors import InfeasibleBudget
from remat.inductor.choose import Choice, choose, given, leanest
from remat.inductor.compile import Compiled, compile_graph
from remat.inductor.compose import compose
from remat.inductor.contract import contract
from remat.inductor.joint import Joint
from remat.inductor.plan import CompiledPlan
from remat.inductor.predict import Rates
from remat.inductor.rates import measure_rates
from remat.pytorch._compat import GraphEnd, break_sentence
from remat.pytorch.allocations import take_matmul_workspaces
from remat.pytorch.owner import Owner
from remat.pytorch.plain import PlainStep
from remat.pytorch.progress import Reporter
from remat.pytorch.session import Settings, device_name, total_device_bytes

CORRECTIONS = 4
"""How often a plan is compiled again because it needs more than was predicted."""


@dataclass(slots=True)
class CompiledGraph:
    """One graph that Dynamo captured, and what runs for it."""

    session: CompiledSession
    number: int
    module: GraphModule
    plain: PlainStep
    device: torch.device
    alone: bool
    joint: Joint | None = None
    rates: Rates | None = None
    compiled: Compiled | None = None
    choice: Choice | None = None

    def __call__(self, *inputs: Any) -> Any:
        self.session.enter(self, inputs)
        assert self.compiled is not None, "a graph is compiled before it is called"
        return self.compiled.call(*inputs)

    @property
    def is_whole_step(self) -> bool:
        """Whether nothing that matters happens outside: the graph is the whole forward and returns scalars."""
        outputs = self.module.graph.output_node().args[0]
        values = [node.meta.get("example_value") for node in outputs if isinstance(node, Node)]  # type: ignore[union-attr]
        tensors = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
        return self.alone and all(value.numel() == 1 for value in tensors)

    def compile(self, inputs: Sequence[Any], decide: Callable[[Joint, Rates], Choice | None]) -> Compiled:
        """Compile under what `decide` says of the joint graph; None leaves the cut to torch."""

        def ask(joint: Joint, nodes: Sequence[Node]) -> frozenset[int] | None:
            if self.joint is None or self.rates is None:
                self.joint = joint
                with self.session.reporter.profiling() as progress:
                    self.rates = measure_rates(joint, nodes, self.device, progress)
            self.choice = decide(self.joint, self.rates)
            return self.choice.saved if self.choice is not None else None

        self.compiled = compile_graph(self.module, inputs, ask)
        return self.compiled


@dataclass(slots=True)
class CompiledSession:
    settings: Settings
    owner: Owner
    graphs: list[CompiledGraph] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    """The graphs that the step under way has called, in order."""
    planned: tuple[int, ...] | None = None
    """The calls that the plan in use was made for."""
    plan: Plan | None = None
    reporter: Reporter = field(init=False)
    broken: bool = False
    accumulates: bool = False
    _inputs_bytes: int = 0
    _waiting: bool = False
    """Whether the calls of the last step are to be planned together."""

    def __post_init__(self) -> None:
        self.reporter = Reporter(self.settings.show_progress)

    def begin_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.broken = False
        accumulates = self.owner.has_gradients()
        if self.calls and (self.planned != tuple(self.calls) or accumulates != self.accumulates):
            self._waiting = True
            self.planned = tuple(self.calls)
        self.accumulates = accumulates
        self._inputs_bytes = sum(self.owner.given(args, kwargs).values())
        self.calls.clear()

    def end_call(self) -> None:
        """Nothing to do: what a step called is looked at when the next one begins."""

    def abandon_call(self) -> None:
        self.calls.clear()

    def note_break(self, end: GraphEnd) -> None:
        if not end.is_backward_call:
            self.broken = True
            warnings.warn(f"Not planned, runs as before: {end.reason}", stacklevel=2)

    def note_skipped(self, reasons: Iterable[str]) -> None:
        for sentence in filter(None, map(break_sentence, () if self.broken else reasons)):
            warnings.warn(f"Not planned, runs as before: {sentence}", stacklevel=3)

    def set_budget(self, budget: Budget) -> None:
        """Plan and compile anew at the next step; what was captured and measured stays."""
        self.settings = replace(self.settings, budget=budget, plan=None)
        self.planned, self._waiting = None, False
        for graph in self.graphs:
            graph.compiled = None

    def add_graph(self, module: GraphModule, plain: PlainStep, device: torch.device, *, alone: bool) -> CompiledGraph:
        graph = CompiledGraph(self, len(self.graphs), module, plain, device, alone)
        self.graphs.append(graph)
        return graph

    def enter(self, graph: CompiledGraph, inputs: Sequence[Any]) -> None:
        """A graph is about to run: make sure that it is compiled, under a plan where there can be one."""
        if self._waiting:
            self._waiting = False
            self._plan_together()
        self.calls.append(graph.number)
        if graph.compiled is None and graph.choice is not None and self.planned is not None:
            choice = graph.choice
            graph.compile(inputs, lambda joint, rates: choice)
        elif graph.compiled is None and graph.is_whole_step and len(self.calls) == 1:
            self._compile_alone(graph, inputs)
        elif graph.compiled is None:
            graph.compile(inputs, lambda joint, rates: leanest(joint, rates))

    def _compile_alone(self, graph: CompiledGraph, inputs: Sequence[Any]) -> None:
        """Plan and compile, and again with less where the compiled step needs more than the budget."""
        resident = self._resident_bytes(graph.device)
        budget = self._budget_bytes([graph], resident)
        reserve = 0
        for _ in range(CORRECTIONS):
            graph.compile(inputs, lambda joint, rates: self._choose(joint, rates, budget - resident - reserve))
            needed = self._needed_bytes(graph, inputs)
            if resident + needed <= budget:
                break
            reserve += resident + needed - budget
        self.planned = (graph.number,)
        self.plan = self._describe([graph], budget, resident, needed)

    def _choose(self, joint: Joint, rates: Rates, budget_bytes: int) -> Choice:
        with self.reporter.solving():
            return choose(
                joint, rates, budget_bytes, solver=self.settings.solver, time_limit_s=self.settings.time_limit_s
            )

    def _needed_bytes(self, graph: CompiledGraph, inputs: Sequence[Any]) -> int:
        """The peak of the compiled graph beyond what is there when it begins."""
        assert graph.choice is not None
        return graph.choice.prediction.peak_bytes

    def _plan_together(self) -> None:
        """All graphs of a step are known: choose for them under one budget, and have them compiled again."""
        graphs = [self.graphs[number] for number in self.planned or ()]
        known = [graph for graph in graphs if graph.joint is not None and graph.rates is not None]
        if len(known) < len(graphs) or len(set(self.planned or ())) < len(graphs):
            # A graph that a step calls twice runs under one choice: the leanest it has.
            return
        device = graphs[0].device
        resident = self._resident_bytes(device)
        budget = self._budget_bytes(graphs, resident)
        whole = compose([graph.joint for graph in graphs], [graph.rates for graph in graphs])  # type: ignore[misc]
        choice = self._choose(whole.joint, whole.rates, budget - resident)
        for call, graph in enumerate(graphs):
            graph.choice = given(graph.joint, graph.rates, whole.part(call, choice.saved))  # type: ignore[arg-type]
            graph.compiled = None
        self.plan = self._describe(
            graphs, budget, resident, choice.prediction.peak_bytes, choice, whole.joint, whole.rates
        )

    def _resident_bytes(self, device: torch.device) -> int:
        resident = sum(self.owner.resident_bytes(device).values()) + self._inputs_bytes
        if device.type != "cuda":
            return resident
        take_matmul_workspaces(device)
        pending = sum(self.owner.resident_bytes(device).values()) - self.owner.present_bytes(device)
        return torch.cuda.memory_allocated(device) + pending

    def _budget_bytes(self, graphs: Sequence[CompiledGraph], resident: int) -> int:
        assert self.settings.budget is not None
        held = 0
        plain = 0
        for graph in graphs:
            plain = max(plain, held + graph.plain.peak_bytes({}) - graph.plain.resident_bytes)
            held += graph.plain.held_bytes - graph.plain.resident_bytes
        return self.settings.budget.resolve(
            plain_peak_bytes=resident + plain, device_bytes=total_device_bytes(graphs[0].device)
        )

    def _describe(
        self,
        graphs: Sequence[CompiledGraph],
        budget: int,
        resident: int,
        needed: int,
        choice: Choice | None = None,
        joint: Joint | None = None,
        rates: Rates | None = None,
    ) -> CompiledPlan:
        choice, joint, rates = choice or graphs[0].choice, joint or graphs[0].joint, rates or graphs[0].rates
        assert choice is not None and joint is not None and rates is not None
        contracted = contract(joint, rates)
        device = graphs[0].device
        return CompiledPlan(
            problem=Problem(contracted.graph, contracted.costs, budget, resident),
            solution=choice.solution,
            fingerprint=Fingerprint((), str(torch.__version__).split("+")[0], device_name(device), ()),
            plain_peak_bytes=resident + graphs[0].plain.peak_bytes({}) - graphs[0].plain.resident_bytes,
            breakdown_bytes=tuple(self.owner.resident_bytes(device).items()),
            compiled_peak_bytes=resident + needed,
            saved=tuple(joint.nodes[number].name for number in sorted(choice.saved)),
        )
