"""A step whose sizes change, compiled once for many of them.

In: a graph that Dynamo captured with sizes left open. Out: what is called in its place. Each compilation is planned for
the largest sizes of a range and runs at all of them; a call outside of every range so far adds one, up to the next
power of two, or as far as was declared. What cannot be compiled for a range is compiled for the sizes of the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from remat.core.budget import Budget
from remat.errors import InfeasibleBudget
from remat.inductor.graph import CompiledGraph, Ready
from remat.inductor.session import CompiledSession
from remat.inductor.shapes.open_inputs import OpenInputs, at_sizes
from remat.pytorch._compat.symbols import Sizes, Symbols, expression_of
from remat.pytorch.costs.plain_peak import PlainStep, inputs_at, plain_step
from remat.pytorch.run.backend import traced_as_eager
from remat.pytorch.run.contract import FoundGraph
from remat.pytorch.run.settings import SizesMatter
from remat.pytorch.run.shapes.buckets import bucket_of, limits_of
from remat.pytorch.run.shapes.open_graph import refuse_open


@dataclass(slots=True)
class OpenStep:
    """Chooses by the sizes of a call what runs."""

    session: CompiledSession
    module: GraphModule
    traced: tuple[Any, ...]
    """What Dynamo traced of the inputs."""
    symbols: Symbols
    device: torch.device
    plains: dict[Sizes, PlainStep]
    """What plain eager needs, as far as it was asked."""
    limits: Sizes | None
    """The largest sizes that were declared."""
    seen: Sizes
    """The largest sizes of calls before this graph was captured."""
    ranges: list[CompiledGraph] = field(default_factory=list)
    fixed: dict[Sizes, CompiledGraph] = field(default_factory=dict)
    """For sizes that no range can have."""
    refused: set[tuple[Sizes, Budget | None]] = field(default_factory=set)
    """Ends of ranges that do not fit."""

    def __call__(self, *inputs: Any) -> Any:
        sizes = self.symbols.read(inputs)
        graph = self.fixed.get(sizes) or self._in_range(sizes) or self._added(sizes, inputs)
        return graph(*inputs)

    def _in_range(self, sizes: Sizes) -> CompiledGraph | None:
        """The narrowest: its plan has the most memory for these sizes."""
        # Where a range is to be planned anew, sizes of then decide how far it goes.
        self.ranges = [graph for graph in self.ranges if isinstance(graph.state, Ready)]
        return next((graph for graph in self.ranges if graph.covers(sizes)), None)

    def _added(self, sizes: Sizes, inputs: Sequence[Any]) -> CompiledGraph:
        for most in self._ends(sizes):
            try:
                graph = self._range_to(most, inputs)
            except InfeasibleBudget:
                # The range need not be as long; where the call itself does not fit, it is compiled alone.
                self.refused.add((most, self.session.settings.budget))
                continue
            except SizesMatter as error:
                self.session.fixed_because = str(error)
                break
            self.ranges.append(graph)
            self.ranges.sort(key=lambda item: item.opened.most if item.opened is not None else ())
            # Inductor may have taken more for granted, as how many rows are worth two loops.
            if graph.covers(sizes):
                return graph
        module = at_sizes(self.module, self._stand_ins(sizes, inputs))
        self.fixed[sizes] = self.session.add_graph(module, self._plain_at(sizes, inputs), self.device, alone=True)
        return self.fixed[sizes]

    def _ends(self, sizes: Sizes) -> Iterator[Sizes]:
        """Of ranges to try, the longest first."""
        if self.session.fixed_because:
            return
        near = tuple(1 << (size - 1).bit_length() for size in sizes)
        longest = tuple(map(max, near, self.seen))
        if self.limits is not None and all(map(int.__le__, sizes, self.limits)):
            longest = self.limits
        found = longest, near, bucket_of(sizes, None, self.symbols.may_be)
        known = {graph.opened.most for graph in self.ranges if graph.opened is not None}
        known |= {most for most, budget in self.refused if budget == self.session.settings.budget}
        yield from dict.fromkeys(ends for ends in found if ends not in known and self.symbols.may_be(ends))

    def _range_to(self, most: Sizes, inputs: Sequence[Any]) -> CompiledGraph:
        opened, plain = OpenInputs(self.traced, self.symbols, most), self._plain_at(most, inputs)
        graph = self.session.add_graph(self.module, plain, self.device, alone=True, opened=opened)
        try:
            graph.prepare(inputs)
        finally:
            # Whatever runs for this call is entered then.
            self.session.calls.clear()
        return graph

    def _stand_ins(self, sizes: Sizes, inputs: Sequence[Any]) -> list[Any]:
        return inputs_at(inputs, self.traced, self.symbols, sizes)

    def _plain_at(self, sizes: Sizes, inputs: Sequence[Any]) -> PlainStep:
        if sizes not in self.plains:
            with traced_as_eager(self.module):
                self.plains[sizes] = plain_step(self.module, self._stand_ins(sizes, inputs), self.device)
        return self.plains[sizes]


def open_step(session: CompiledSession, found: FoundGraph, symbols: Symbols, device: torch.device) -> OpenStep:
    """Raises `SizesMatter` where a step is planned for one shape at a time."""
    settings, inputs = session.settings, found.module.graph.find_nodes(op="placeholder")
    refuse_open(settings, session.agreement.ranks, is_alone=found.alone)
    if settings.search_s > 0:
        raise SizesMatter("A search by measurement is for one shape at a time.")
    traced = tuple(node.meta["example_value"] for node in inputs)
    plains = {symbols.hints: found.plain_at(symbols, symbols.hints)}
    limits, seen = limits_of(symbols.hints, settings.bounds), _seen(session, found.module, symbols)
    return OpenStep(session, found.module, traced, symbols, device, plains, limits, seen)


def _seen(session: CompiledSession, module: GraphModule, symbols: Symbols) -> Sizes:
    """The largest sizes, of this graph and of those that were captured before at one shape each."""
    found = dict(zip(symbols.names, symbols.hints, strict=True))
    shapes = [_shapes(graph.module) for graph in session.graphs]
    for name, shape in _shapes(module).items():
        for dim, size in enumerate(shape):
            earlier = (other[name][dim] for other in shapes if len(other.get(name, ())) == len(shape))
            if (symbol := expression_of(size)) in found:
                found[symbol] = max(found[symbol], *(int(one) for one in earlier if isinstance(one, int)), 0)
    return tuple(found.values())


def _shapes(module: GraphModule) -> dict[str, torch.Size]:
    inputs = ((node.name, node.meta.get("example_value")) for node in module.graph.find_nodes(op="placeholder"))
    return {name: value.shape for name, value in inputs if isinstance(value, torch.Tensor)}
