"""A graph that was traced with sizes left open, in the variants and buckets in which a step uses it.

It is looked at closely at a few sizes: all must be the same graph, op by op and argument by argument, with the bytes
that tracing says; ops are measured there. After that a new bucket costs next to nothing. Where one of these does not
hold, tracing starts over with fixed sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from remat.core.budget import BudgetScope
from remat.core.problem import Problem
from remat.pytorch._compat.symbols import Sizes, Symbols, is_open, layout_at
from remat.pytorch.costs.plain_peak import PlainStep
from remat.pytorch.graph.capture import Captured
from remat.pytorch.graph.instance import at_sizes, value_amounts
from remat.pytorch.graph.open_sizes import OPEN
from remat.pytorch.run.settings import Settings, SizesMatter
from remat.pytorch.run.shapes.buckets import Bound, bucket_of, limits_of, most_sizes, sample_points
from remat.pytorch.run.shapes.laws import CostLaws, CostSample, FollowedPlain, find_laws, kept_bytes, plain_at
from remat.pytorch.run.variants import TracedGraph, Variant, described

PlainAt = Callable[[Symbols, Sizes], PlainStep]
"""What plain eager needs at certain sizes; takes as long as tracing."""


@dataclass(slots=True)
class OpenGraph:
    """Stands for a `TracedGraph` at whichever sizes a call has."""

    symbols: Symbols
    joint: GraphModule
    """With sizes left open."""
    make: Callable[[GraphModule], TracedGraph]
    """The graph at some sizes."""
    plains: dict[Sizes, PlainStep]
    most: Sizes
    """The largest sizes at which ops are measured."""
    limits: Sizes | None = None
    """The largest that were declared."""
    samples: dict[Sizes, TracedGraph] = field(init=False)
    sizes: Sizes = field(init=False)
    """Of the bucket of the latest call."""
    _laws: dict[frozenset[int], CostLaws] = field(default_factory=dict)
    _variants: dict[tuple[frozenset[int], Sizes], Variant] = field(default_factory=dict)
    _plain_peaks: dict[frozenset[int], list[FollowedPlain]] = field(default_factory=dict)
    _declared_bytes: int | None = None
    """Found once: every new bucket asks for it."""

    def __post_init__(self) -> None:
        points = sample_points(self.most, self.symbols.may_be)
        if len(points) < 2:
            raise SizesMatter("This graph is the same at no two sizes, so it is captured for each.")
        self.samples = {point: self.make(at_sizes(self.joint, self.symbols, point)) for point in points}
        first, *others = (graph.joint for graph in self.samples.values())
        for other in others:
            if different := _difference(first, other):
                raise SizesMatter(f"This step is not called alike at all sizes: {different}.")
        self.sizes = self.symbols.hints

    @property
    def template(self) -> TracedGraph:
        return next(iter(self.samples.values()))

    @property
    def full(self) -> Captured:
        return self.template.full

    @property
    def number(self) -> int:
        return self.template.number

    def settle(self, inputs: Sequence[Any]) -> float:
        """A call with these inputs starts; by how much larger they may be under the same plan."""
        sizes = self.symbols.read(inputs)
        # What the caller does outside is measured at the sizes of the call, and is true of no others.
        is_whole = self.template.variant().is_whole_step
        self.sizes = bucket_of(sizes, self.limits, self.symbols.may_be) if is_whole else sizes
        if any(size > most for size, most in zip(self.sizes, self.most, strict=True)):
            self._look_further()
        return math.prod(end / size for size, end in zip(sizes, self.sizes, strict=True))

    def _look_further(self) -> None:
        """Beyond what was measured, laws are only guesses: measure there, and as far again."""
        ends = tuple(max(size, most) for size, most in zip(self.sizes, self.most, strict=True))
        self.most = most_sizes(ends, self.limits, self.symbols.may_be)
        further = self.make(at_sizes(self.joint, self.symbols, self.most))
        # A training that has begun goes on by the laws it has.
        if not _difference(self.template.joint, further.joint):
            self.samples[self.most] = further
            self._laws.clear()

    def variant(self) -> Variant:
        """The graph as the call under way uses it."""
        model = self.template.variant()
        key = model.absent, self.sizes
        if key not in self._variants:
            self._variants[key] = self._sized(model)
        return self._variants[key]

    def knows_sizes(self) -> bool:
        """Whether those of the call under way were met before."""
        return (self.template.variant().absent, self.sizes) in self._variants

    def as_traced(self) -> Variant:
        """With sizes open: what is lowered for it runs at any."""
        return self.template.variant()

    def _sized(self, model: Variant) -> Variant:
        laws, sizes = self._laws_of(model), self.sizes
        costs = laws.costs_at(sizes)
        plain = self.plains.get(sizes) or plain_at(self._followed(model), Problem(model.captured.graph, costs, 0))
        return Variant(
            (*model.key[:2], sizes),
            laws.captured_at(sizes),
            model.full,
            model.absent,
            plain,
            model.is_whole_step,
            _costs=costs,
            model=model,
            lowerings=model.lowerings,
            shape_words=tuple(self._words_at(sizes)),
        )

    def _followed(self, model: Variant) -> list[FollowedPlain]:
        if model.absent not in self._plain_peaks:
            laws, graph = self._laws_of(model), model.captured.graph
            self._plain_peaks[model.absent] = [
                FollowedPlain(plain, plain.peak_bytes(), kept_bytes(Problem(graph, laws.costs_at(sizes), 0)))
                for sizes, plain in self.plains.items()
            ]
        return self._plain_peaks[model.absent]

    def _words_at(self, sizes: Sizes) -> Iterable[str]:
        for node in self.full.inputs():
            traced, value = node.meta.get(OPEN), node.meta.get("val")
            if hasattr(traced, "shape"):
                shape, _, _ = layout_at(traced, lambda amount: self.symbols.amount(amount, sizes))
                yield f"{str(traced.dtype)[6:]}{list(shape)}"
            else:
                yield described(value)

    def _laws_of(self, model: Variant) -> CostLaws:
        if model.absent not in self._laws:
            samples = [sample for sample in self._samples_of(model) if sample is not None]
            self._laws[model.absent] = find_laws(self.symbols, value_amounts(model.captured), samples)
            self._plain_peaks.pop(model.absent, None)
        return self._laws[model.absent]

    def _samples_of(self, model: Variant) -> Iterator[CostSample | None]:
        """The graph at each of the sizes that were looked at; None where it is another one there."""
        amounts = value_amounts(model.captured)
        for sizes, graph in self.samples.items():
            graph.absent = model.absent
            captured = graph.variant().captured
            expected = tuple(self.symbols.amount(amount, sizes) for amount in amounts)
            is_same = captured.graph == model.captured.graph and captured.asked_bytes == expected
            is_same = is_same and not _difference(model.captured.joint, captured.joint)
            yield CostSample(sizes, captured, graph.variant().costs()) if is_same else None

    def check(self) -> None:
        """Raise where the graph is not the same at all sizes that were looked at: nothing has run yet."""
        if None in self._samples_of(self.template.variant()):
            raise SizesMatter(f"This step is not the same graph at {', '.join(map(str, self.samples))}.")

    def declared_plain_bytes(self) -> int:
        """See `TracedGraph.declared_plain_bytes`."""
        plain = self.plains.get(self.limits) if self.limits is not None else None
        if plain is not None and self._declared_bytes is None:
            self._declared_bytes = plain.peak_bytes() - plain.resident_bytes
        return self._declared_bytes or 0

    def measure_again(self) -> None:
        """See `TracedGraph.measure_again`."""
        for graph in self.samples.values():
            graph.measure_again()
        self._declared_bytes = None
        self._laws.clear()
        self._variants.clear()

    def return_all(self) -> None:
        """See `TracedGraph.return_all`."""
        for graph in self.samples.values():
            graph.return_all()
        self._laws.clear()
        self._variants.clear()

    def saw(self, absent: frozenset[int]) -> None:
        """See `TracedGraph.saw`."""
        self.template.saw(absent)


def open_graph(
    joint: GraphModule,
    num_forward_outputs: int,
    symbols: Symbols,
    plain_at: PlainAt,
    make: Callable[..., TracedGraph],
    bounds: Sequence[Bound],
) -> OpenGraph:
    """Of a joint graph; raises `SizesMatter` where its sizes cannot be left open."""
    limits = limits_of(symbols.hints, bounds)
    most = most_sizes(symbols.hints, limits, symbols.may_be)
    plains = {sizes: plain_at(symbols, sizes) for sizes in dict.fromkeys((most, symbols.hints))}

    def traced(at: GraphModule) -> TracedGraph:
        return make(joint=at, num_forward_outputs=num_forward_outputs, plain=plains[most])

    graph = OpenGraph(symbols, joint, traced, plains, most, limits)
    graph.check()
    return graph


def refuse_open(settings: Settings, ranks: int, *, is_alone: bool) -> None:
    """Raise where a step is planned for one shape at a time."""
    if not is_alone:
        raise SizesMatter("This step is several graphs, whose surroundings are measured at every shape.")
    if ranks > 1:
        raise SizesMatter("Several ranks plan together, each of which may meet other shapes.")
    if settings.budget is None or settings.counts is not BudgetScope.LIVE or settings.offload:
        raise SizesMatter("A given plan, an arena and copies to the host are for one shape at a time.")


def refuse_untold(joint: GraphModule) -> None:
    """Raise where sizes of a graph are left open that none of its inputs tells."""
    values = (node.meta.get("val") for node in joint.graph.nodes)
    if any(is_open(value) for value in values if isinstance(value, torch.Tensor)):
        raise SizesMatter("A size that is left open is told by none of the graph's inputs.")


def _difference(one: GraphModule, other: GraphModule) -> str:
    """Where two graphs are not called alike; empty where they are."""
    left, right = (list(graph.graph.nodes) for graph in (one, other))
    if len(left) != len(right):
        return f"{len(left)} nodes at one size and {len(right)} at another"
    pairs = zip(left, right, strict=True)
    return next((f"`{here.name}`" for here, there in pairs if _said(here) != _said(there)), "")


def _said(node: Node) -> tuple[str, str, str, str]:
    args, kwargs = map_arg((node.args, node.kwargs), lambda item: item.name)
    return node.op, str(node.target), repr(args), repr(kwargs)
