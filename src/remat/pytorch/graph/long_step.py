"""The joint graph of a step that repeats a block many times, without tracing every block.

In: a graph that Dynamo found. Where it has long runs of alike blocks, two short versions of it are traced, one with a
block more than the other. The first, made longer by one block, has to be the second, node by node and storage by
storage; then it is made as long as the step. AOTAutograd is given a stand-in that takes the step's inputs, writes to
those that it writes to and returns what it returns, but computes nothing: so it makes everything around the graph
(mutated inputs, autocast, what the caller gets) as for the step itself, and the long graph takes the place of the
stand-in's.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from remat.pytorch._compat.dynamo import aot_autograd
from remat.pytorch._compat.modes import without_modes
from remat.pytorch._compat.symbols import has_open_inputs
from remat.pytorch._compat.tensors import storage_address, zero_all
from remat.pytorch._compat.tracing import lazy_module
from remat.pytorch.graph.nodes import is_computed, is_tangent, tensors_in
from remat.pytorch.graph.repeated_joint import LongJoint, ShortJoint, joint_difference
from remat.pytorch.graph.repeats import FIRST, LAST, NotAlike, Shortened, find_runs, shorten

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """A graph to be written: what it takes, of the whole graph's inputs, and what its blocks take for themselves."""

    inputs: tuple[Node, ...]
    own: tuple[tuple[tuple[Node, ...], ...], ...]
    """By run and block."""

    @property
    def gaps(self) -> list[int]:
        return [len(rows) - FIRST - LAST for rows in self.own]


@dataclass(slots=True)
class LongStep:
    """A step whose joint graph is written, not traced."""

    module: GraphModule
    shortened: Shortened
    short: ShortJoint
    results: list[Node] = field(init=False)
    """What forward of the short graph returns to the caller."""
    updates: dict[Node, Any] = field(init=False)
    """By inputs of the short graph that are written to: their new contents."""
    gradients: dict[Node, Any] = field(init=False)

    def __post_init__(self) -> None:
        output, inputs = self.short.output(), self.short.inputs()
        found, count = list(output.args[0]), self.short.num_forward_outputs
        described_inputs = {repr(node.meta["desc"]): node for node in inputs}
        targets = [getattr(desc, "mutated_input", None) for desc in output.meta["desc"][:count]]
        self.updates = {described_inputs[repr(to)]: node for to, node in zip(targets, found, strict=False) if to}
        self.results = found[len(self.updates) : count]
        self.gradients = dict(zip(inputs, found[count:], strict=True))
        if len(self.results) != len(_outputs(self.module)) or any(targets[len(self.updates) :]):
            raise NotAlike("forward returns more than the caller gets")
        self._check_results()

    def _check_results(self) -> None:
        """AOTAutograd makes aliases of other tensors again, outside of the graph: the stand-in has none."""
        if any(tensor.requires_grad for tensor in map(_value, self.updates)):
            raise NotAlike("an input that requires gradients is written to")
        taken = {storage_address(tensor) for node in self.short.inputs() for tensor in tensors_in(node.meta["val"])}
        for node in self.results:
            value = node.meta.get("val") if isinstance(node, Node) else None
            if not isinstance(value, torch.Tensor) or not is_computed(node) or storage_address(value) in taken:
                raise NotAlike("a result is a view")
            taken.add(storage_address(value))

    def whole(self) -> Target:
        inputs = tuple(self.module.graph.find_nodes(op="placeholder"))
        return Target(inputs, tuple(run.own for run in self.shortened.runs))

    def stand_in(self) -> GraphModule:
        """What AOTAutograd is given: it takes, writes to and returns what the step does."""
        graph, traced = Graph(), self._traced()
        made = {node: graph.node_copy(node) for node in self.module.graph.find_nodes(op="placeholder")}
        known = {node for node, place in traced.items() if place in self.updates}
        for run in self.shortened.runs:
            kept = [slot for slot, node in enumerate(run.own[FIRST - 1]) if node in known]
            known.update(row[slot] for row in run.own for slot in kept)
        outputs = _outputs(self.module)
        needed = [item.meta["example_value"].requires_grad for item in outputs]
        stands = _stands_in(list(zip(map(_value, self.results), needed, strict=True)))
        call = graph.call_function(stands, ([made[node] for node in made if node in known], list(made.values())))
        graph.output(tuple(graph.call_function(operator.getitem, (call, place)) for place in range(len(outputs))))
        return GraphModule({}, graph)

    def graft(self, joint: GraphModule) -> GraphModule:
        """The step's joint graph, given that of its stand-in."""
        graph = Graph()
        made = {node: _input(graph, node) for node in joint.graph.find_nodes(op="placeholder")}
        inputs = [node for node in made if not is_tangent(node)]
        target = self.whole()
        here = dict(zip(target.inputs, map(made.__getitem__, inputs), strict=True))
        tangents = [made[node] for node in made if is_tangent(node)]
        updates, results, gradients = self.write(target, graph, here, tangents)
        *_, output = joint.graph.nodes
        written = [node for node in target.inputs if node in updates]
        found = (*(updates[node] for node in written), *results, *(gradients[node] for node in target.inputs))
        if len(found) != len(output.args[0]):
            raise NotAlike("the stand-in does not return what the step does")
        graph.output(found).meta.update(output.meta)
        return lazy_module(self.short.joint, graph)

    def write(
        self, target: Target, graph: Graph, here: Mapping[Node, Node], tangents: Sequence[Node]
    ) -> tuple[dict[Node, Any], list[Any], dict[Node, Any]]:
        """Write a longer graph: what becomes of inputs, what forward returns, gradients of inputs."""
        traced = self._traced()
        inputs = {traced[node]: here[node] for node in self.shortened.inputs}
        ours = (node for node in self.short.joint.graph.find_nodes(op="placeholder") if is_tangent(node))
        inputs |= dict(zip(ours, tangents, strict=True))
        for one, other in inputs.items():
            # Views of inputs were traced on these.
            other.meta["val"] = one.meta["val"]
        long = LongJoint(
            self.short, target.gaps, graph, inputs, lambda run, slot, block: here[target.own[run][block][slot]]
        )
        with without_modes():
            long.write()

        def of_inputs(of: Mapping[Node, Any]) -> dict[Node, Any]:
            found = {node: long.made(of[traced[node]]) for node in self.shortened.inputs if traced[node] in of}
            for rows in target.own:
                for block in range(FIRST, len(rows) - LAST):
                    for slot, node in enumerate(rows[block]):
                        last, before = (of.get(traced[rows[place][slot]]) for place in (FIRST - 1, FIRST - 2))
                        found[node] = long.of_missing(last, before, block)
            return found

        updates = {node: item for node, item in of_inputs(self.updates).items() if item is not None}
        return updates, list(map(long.made, self.results)), of_inputs(self.gradients)

    def _traced(self) -> dict[Node, Node]:
        """Inputs of the short joint graph by those of the whole one."""
        return dict(zip(self.shortened.inputs, self.short.inputs(), strict=True))


def long_step(module: GraphModule, inputs: Sequence[Any]) -> LongStep | None:
    """The step whose graph this is, where it has runs of alike blocks; None where it has to be traced as it is."""
    try:
        runs = find_runs(module) if _are_plain(inputs) and not has_open_inputs(module) else ()
        if not runs:
            return None
        shortened = shorten(module, runs)
        step = LongStep(module, shortened, _traced_short(shortened, inputs))
        _check(step, shorten(module, runs, FIRST + 1), inputs)
    except Exception as error:
        # Whatever is the matter with short versions of it, the step itself can still be traced.
        _log.info("Every block of the step is traced: %s: %s.", type(error).__name__, error)
        return None
    return step


def _traced_short(shortened: Shortened, inputs: Sequence[Any]) -> ShortJoint:
    joint, count = _traced(shortened, inputs)
    taken = [node for node in joint.graph.find_nodes(op="placeholder") if not is_tangent(node)]
    writes = joint.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    if len(taken) != len(shortened.inputs) or writes:
        raise NotAlike("the graph takes other inputs than it is given, or writes to them itself")
    own = {taken[place]: known for place, known in shortened.own().items()}
    return ShortJoint(joint, count, own, shortened.first, shortened.runs)


def _check(step: LongStep, longer: Shortened, inputs: Sequence[Any]) -> None:
    """Made longer by a block, the short graph has to be what tracing finds with a block more."""
    joint, _ = _traced(longer, inputs)
    own = [[row for block, row in enumerate(run.own) if block not in run.left_out(longer.first)] for run in longer.runs]
    graph, target = Graph(), Target(longer.inputs, tuple(map(tuple, own)))
    made = {node: _input(graph, node) for node in joint.graph.find_nodes(op="placeholder")}
    here = dict(zip(longer.inputs, (made[node] for node in made if not is_tangent(node)), strict=True))
    updates, results, gradients = step.write(target, graph, here, [made[node] for node in made if is_tangent(node)])
    written = [updates[node] for node in target.inputs if node in updates]
    graph.output((*written, *results, *(gradients[node] for node in target.inputs)))
    if difference := joint_difference(graph, joint.graph):
        raise NotAlike(difference)


class _Seen(Exception):
    """The joint graph was traced, and that is all."""


def _traced(shortened: Shortened, inputs: Sequence[Any]) -> tuple[GraphModule, int]:
    """The joint graph of a short version, and how much forward returns."""
    found: list[tuple[GraphModule, int]] = []

    def partition(joint: GraphModule, _: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        found.append((joint, num_fwd_outputs))
        raise _Seen

    compiler = aot_autograd(
        fw_compiler=_unused, bw_compiler=_unused, inference_compiler=_unused, partition_fn=partition
    )
    try:
        compiler(shortened.module, [inputs[place] for place in shortened.places])
    except _Seen:
        return found[0]
    raise NotAlike("nothing of it has gradients")


def _unused(*_: Any) -> Any:
    raise NotAlike("nothing of it has gradients")


def _stands_in(results: Sequence[tuple[torch.Tensor, bool]]) -> Callable[..., Any]:
    """A function that writes to its first arguments and returns tensors like these, with gradients or without."""

    class StandIn(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            ctx.inputs = inputs
            made = [
                torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
                for like, _ in results
            ]
            pairs = zip(made, results, strict=True)
            ctx.mark_non_differentiable(*(item for item, (_, needs) in pairs if not needs))
            return tuple(made)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            # Nobody computes these: anything that is laid out like them will do.
            return tuple(item if needs else None for item, needs in zip(ctx.inputs, ctx.needs_input_grad, strict=True))

    def stand_in(written: Sequence[torch.Tensor], inputs: Sequence[Any]) -> Any:
        if written:
            zero_all(written)
        return StandIn.apply(*inputs)

    return stand_in


def _input(graph: Graph, node: Node) -> Node:
    made = graph.placeholder(str(node.target))
    made.meta = dict(node.meta)
    return made


def _outputs(module: GraphModule) -> list[Any]:
    """What Dynamo's graph returns."""
    *_, output = module.graph.nodes
    found = list(output.args[0])
    if any(
        not isinstance(node, Node) or not isinstance(node.meta.get("example_value"), torch.Tensor) for node in found
    ):
        raise NotAlike("something other than tensors is returned")
    return found


def _value(node: Node) -> torch.Tensor:
    found = node.meta["val"]
    assert isinstance(found, torch.Tensor)
    return found


def _are_plain(inputs: Sequence[Any]) -> bool:
    """Whether inputs are tensors of no other kind, each on a storage of its own."""
    if any(type(item) not in (torch.Tensor, nn.Parameter) for item in inputs):
        return False
    return len({storage_address(item) for item in inputs}) == len(inputs)
