"""Gradients that hooks use up at once, as an optimizer inside backward does.

Autograd accumulates what a graph's backward returns when it is over, so that all gradients would be in memory together.
Here a gradient whose parameter has such a hook leaves in the middle: an op of the graph, `hand_over`, accumulates it
and calls the hooks, and what it took is free again. The hook may write to the parameter, so `after_readers` has each of
these ops wait for the last op that reads it, recomputations included.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from remat.core.graph import OpId
from remat.core.schedule import Schedule
from remat.pytorch._compat.distributed import parallel_at_work
from remat.pytorch._compat.engine import accumulates, leaf_uses, unwatch_engine, watch_engine
from remat.pytorch._compat.tensors import changes_gradients, gradient_hooks_of, silence_gradient_hooks
from remat.pytorch.graph.capture import Captured, resident_roots


def with_hand_over(joint: GraphModule, num_forward_outputs: int, places: Collection[int]) -> GraphModule:
    """A copy of `joint` that hands over the gradients of the inputs at `places` in the middle of backward."""
    graph = Graph()
    copied: dict[Node, Node] = {}
    outputs = list(graph.graph_copy(joint.graph, copied))
    original = next(iter(joint.graph.find_nodes(op="output")))
    output = graph.output(tuple(outputs))
    output.meta.update(original.meta)
    for place in sorted(places):
        number = num_forward_outputs + place
        if number < len(outputs) and _belongs_to(output, outputs[number]):
            gradient = outputs[number]
            with graph.inserting_after(gradient):
                outputs[number] = graph.call_function(hand_over, (gradient, place))
            outputs[number].meta.update(gradient.meta, val=gradient.meta["val"].new_empty(0))
    output.args = (tuple(outputs),)
    graph.lint()
    return GraphModule(joint, graph)


def _belongs_to(output: Node, gradient: Any) -> bool:
    """Whether nothing else reads the gradient's storage."""
    if not isinstance(gradient, Node) or list(output.args[0]).count(gradient) != 1:
        return False
    node, reader = gradient, output
    while set(node.users) == {reader} and node.op == "call_function":
        if not getattr(node.target, "is_view", False):
            return isinstance(gradient.meta.get("val"), torch.Tensor)
        reader, node = node, node.args[0]
    return False


def after_readers(captured: Captured, schedule: Schedule) -> Schedule:
    """The same schedule in which no op reads a parameter after its gradient was handed over."""
    readers = readers_of_handed(captured)
    return Schedule(delayed(schedule.steps, readers)) if readers else schedule


def handed_places(captured: Captured) -> tuple[int, ...]:
    """Numbers of the inputs whose gradients the graph hands over."""
    return tuple(node.args[1] for _, node in _handing(captured))


def readers_of_handed(captured: Captured) -> dict[OpId, frozenset[OpId]]:
    """For each op that hands over a gradient, those that read its parameter."""
    inputs = captured.inputs()
    handed = {inputs[node.args[1]]: OpId(number) for number, node in _handing(captured)}
    readers: dict[OpId, set[OpId]] = {number: set() for number in handed.values()}
    for number, node in enumerate(captured.op_nodes if handed else ()):
        for root in resident_roots(captured, node.all_input_nodes if node is not None else ()):
            if root in handed:
                readers[handed[root]].add(OpId(number))
    return {number: frozenset(found) for number, found in readers.items()}


def _handing(captured: Captured) -> Iterator[tuple[int, Any]]:
    return ((number, node) for number, node in enumerate(captured.op_nodes) if node and node.target is hand_over)


def delayed(steps: Sequence[OpId], readers: Mapping[OpId, Collection[OpId]]) -> tuple[OpId, ...]:
    """`steps` with each op of `readers` no sooner than right after the last of those it waits for."""
    last = {
        op: max((place for place, step in enumerate(steps) if step in found), default=-1)
        for op, found in readers.items()
    }
    waiting: dict[int, list[OpId]] = {}
    moved: list[OpId] = []
    for place, step in enumerate(steps):
        if last.get(step, -1) > place:
            waiting.setdefault(last[step], []).append(step)
        else:
            moved.append(step)
        moved.extend(waiting.pop(place, ()))
    return tuple(moved)


class HandedOver:
    """The parameters of one forward whose gradients its backward hands over, while only this graph has one for them."""

    __slots__ = ("__weakref__", "_parameters", "alone", "kept")

    def __init__(self, inputs: Sequence[Any], places: Iterable[int]) -> None:
        self._parameters = {place: inputs[place] for place in places}
        self.alone: frozenset[int] = frozenset()
        """Those for which the backward under way brings no other gradient."""
        self.kept = False
        """Whether a hook has left a gradient where it was."""
        _waiting.add(self)
        watch_engine(_watcher)

    def meet(self, uses: Mapping[int, int]) -> None:
        """A backward begins that has so many gradients for each leaf."""
        self.alone = frozenset(place for place, item in self._parameters.items() if uses.get(id(item)) == 1)

    def take(self, gradient: torch.Tensor, place: int) -> torch.Tensor | None:
        """Accumulate as autograd does and call the hooks; gives back what is not to be accumulated here."""
        parameter = self._parameters[place]
        if place not in self.alone or changes_gradients(parameter) or not accumulates(parameter):
            return gradient
        if parameter.grad is not None:
            parameter.grad += gradient
        elif gradient.stride() == parameter.stride():
            parameter.grad = gradient.detach()
        else:
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        for hook in gradient_hooks_of(parameter):
            hook(parameter)
        # Autograd calls them once more when backward is over, where there is no gradient.
        _watcher.when_over.append(silence_gradient_hooks(parameter))
        self.kept |= parameter.grad is not None
        return None


_running: list[HandedOver] = []


@contextmanager
def handing_over(handed: HandedOver | None) -> Iterator[None]:
    """What `hand_over` is given meanwhile belongs to these parameters; where there are none, it is not called."""
    if handed is None:
        yield
        return
    _running.append(handed)
    try:
        yield
    finally:
        _running.pop()


def hand_over(gradient: torch.Tensor, place: int) -> torch.Tensor | None:
    """The op of the graph; see the module's docstring."""
    return _running[-1].take(gradient, place)


hand_over.costs_nothing = True  # type: ignore[attr-defined]


class _Watcher:
    """Tells those who wait what the backward that begins will bring."""

    def __init__(self) -> None:
        self.when_over: list[Callable[[], None]] = []
        """To be called when the backward under way is over."""
        self._depth = 0
        """A hook may go backward, too."""

    def engine_began(self, roots: Sequence[torch.Tensor]) -> None:
        self._depth += 1
        uses = leaf_uses(roots) if _waiting else {}
        for handed in list(_waiting):
            handed.meet(uses)

    def engine_returned(self) -> None:
        self._depth -= 1
        if self._depth:
            return
        while self.when_over:
            self.when_over.pop()()
        if not _waiting:
            unwatch_engine(self)


_waiting: weakref.WeakSet[HandedOver] = weakref.WeakSet()
_watcher = _Watcher()


def arrivals(captured: Captured) -> tuple[int, ...]:
    """The inputs that have gradients, in the order in which eager autograd would have them."""
    order = {node: number for number, node in enumerate(captured.joint.graph.nodes)}
    made = {place: order[node] for place, node in enumerate(captured.backward_outputs) if isinstance(node, Node)}
    return tuple(sorted(made, key=made.__getitem__))


def in_order(compiled: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """`compiled`, whose gradients reach parameters in that order where ranks reduce them.

    All of them leave a graph together, and DDP sorts gradients into buckets as they first come: in another order sums
    over ranks would be rounded otherwise. Autograd takes the nodes that it made last first.
    """

    def call(*inputs: Any) -> Any:
        if parallel_at_work() is None:
            return compiled(*inputs)
        passed = list(inputs)
        for place in reversed(places):
            if isinstance(passed[place], nn.Parameter):
                passed[place] = passed[place].view_as(passed[place])
        return compiled(*passed)

    return call
