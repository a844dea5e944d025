"""What a session knows of shapes: graphs for one of them or for many, and plans that serve more than one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch.fx import GraphModule

from remat.core.budget import Budget
from remat.core.results.plan import Plan
from remat.distributed.agreement.agreed import Agreement
from remat.pipeline import lower_plan
from remat.pytorch._compat.symbols import Symbols
from remat.pytorch.costs.plain_peak import PlainStep
from remat.pytorch.run.compose import Call
from remat.pytorch.run.lower import Lowered
from remat.pytorch.run.planning import Key, Planned, WatchedStep
from remat.pytorch.run.settings import Settings
from remat.pytorch.run.shapes.open_graph import OpenGraph, PlainAt, open_graph, refuse_open
from remat.pytorch.run.shapes.transfer import PlanTransfer
from remat.pytorch.run.variants import TracedGraph, Variant
from remat.pytorch.run.watching.step_watch import StepWatch

AnyGraph = TracedGraph | OpenGraph
"""What was traced for one shape, or for many."""


class KnowsShapes:
    """A session whose plans may serve many shapes."""

    settings: Settings
    agreement: Agreement
    watch: StepWatch
    graphs: list[AnyGraph]
    planned: list[Planned]
    transfer: PlanTransfer

    def add_graph(self, joint: GraphModule, num_forward_outputs: int, plain: PlainStep, **facts: Any) -> TracedGraph:
        """Take in a newly traced graph; see `TracedGraph`."""
        graph = TracedGraph(len(self.graphs), joint, num_forward_outputs, plain, **facts)
        self.graphs.append(graph)
        return graph

    def add_open_graph(
        self, joint: GraphModule, num_forward_outputs: int, symbols: Symbols, plain_at: PlainAt, **facts: Any
    ) -> OpenGraph:
        """The same of one that leaves sizes open; raises where it cannot be planned for all of them at once."""
        refuse_open(self.settings, self.agreement.ranks, is_alone=facts["alone"])
        # Ops are measured at several sizes now, for which the profiler is needed that watches a step.
        self.watch.look_away()
        make = partial(TracedGraph, len(self.graphs), **facts)
        graph = open_graph(joint, num_forward_outputs, symbols, plain_at, make, self.settings.bounds)
        self.graphs.append(graph)
        return graph

    def settled(self, graph: AnyGraph, inputs: Sequence[Any]) -> tuple[Variant, float]:
        """The graph as the call that starts now uses it, and by how much larger inputs may be under the same plan."""
        growth = graph.settle(inputs)
        if isinstance(graph, OpenGraph) and not graph.knows_sizes():
            # As above.
            self.watch.look_away()
        return graph.variant(), growth

    def take_better(self, first: Variant) -> None:
        """Between two steps, a plan for sizes that are left open may be replaced by a faster one."""
        if first.model is None:
            return
        self.transfer.collect()
        for place, item in enumerate(self.planned):
            if item.key[0][0] == first.key and (plan := self.transfer.better(item)) is not None:
                lowered = self.lowered(plan, item.key, [Call(first.captured, first.costs())])
                self.planned[place] = replace(item, made=plan, plan=plan, lowered=lowered)

    def known_plan(self, seen: WatchedStep, budget: Budget) -> Plan | None:
        """From schedules that are known for other sizes of the same graph; None where there are none that fit."""
        graph = self.graphs[seen.key[0][0][0]]
        if not isinstance(graph, OpenGraph) or len(seen.calls) > 1:
            return None
        return self.transfer.plan(seen, budget, graph.variant().frugal().schedule)

    def lowered(self, plan: Plan, key: Key, calls: Sequence[Call]) -> tuple[Lowered, ...]:
        """What runs under a plan; sizes that are left open share what was lowered for another."""
        graph = self.graphs[key[0][0][0]]
        if not isinstance(graph, OpenGraph) or len(calls) > 1 or plan.schedule is None:
            return lower_plan(plan, calls)
        shared = graph.variant().lowerings
        if plan.schedule not in shared:
            (shared[plan.schedule],) = lower_plan(plan, calls, join=False)
        return (shared[plan.schedule],)

    def largest_plain_bytes(self, seen: WatchedStep) -> int:
        """What plain eager needs for a step, or for the largest that was declared."""
        around, graph = seen.surroundings, self.graphs[seen.key[0][0][0]]
        resident = sum(size for _, size in around.resident_bytes)
        return max(around.plain_peak_bytes, resident + graph.declared_plain_bytes())
