"""Saved tensors of a compiled step that spend the time between their last use in forward and their first in backward on
the host.

In: the two halves that a partitioner made, how fast values move, how many bytes are to be away, and about how long each
node takes. Out: the halves with the ops of `away_ops.py` in them. Of what forward saves, what is made first leaves
first: it has the longest way, and backward reads it last. A copy out is waited for where it should be over by itself,
and a copy back begins as late as it can and still come in time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from remat.core.copies import OffloadPlace
from remat.inductor.away_ops import fetch, fetched, send, sent
from remat.pytorch._compat.fakes import FakeTensor
from remat.pytorch._compat.tensors import storage_address
from remat.pytorch.graph.moved import LEAST_BYTES

IN_TIME = 1.1
"""Copies are taken to need so many times what they should."""


@dataclass(frozen=True, slots=True)
class NodeTimes:
    """About how long nodes take, by their names; those that are not named, nothing."""

    forward: Mapping[str, float]
    backward: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Travel:
    """What is to be away."""

    place: OffloadPlace
    size_bytes: int
    times: NodeTimes

    def apply(self, forward: GraphModule, backward: GraphModule, count: int) -> int:
        """Change both halves; `count` is how many outputs of forward are the caller's. Gives the bytes that travel."""
        chosen = self._chosen(forward, backward, count)
        if not chosen:
            return 0
        handles = self._leave(forward, chosen)
        self._come_back(backward, chosen, handles)
        for half in (forward, backward):
            half.graph.lint()
            half.recompile()
        return sum(_bytes(node) for node in chosen)

    def _chosen(self, forward: GraphModule, backward: GraphModule, count: int) -> list[Node]:
        """Saved tensors with storages of their own, in the order in which they are made."""
        outputs: Any = forward.graph.output_node().args[0]
        given = {_storage(node) for node in forward.graph.nodes if node.op == "placeholder"}
        shared = given | {_storage(node) for node in outputs[:count] if isinstance(node, Node)}
        taken = {node.name for node in backward.graph.nodes if node.op == "placeholder" and node.users}
        saved = [node for node in outputs[count:] if isinstance(node, Node) and node.name in taken]
        holders = [_storage(node) for node in saved]
        order = {node: number for number, node in enumerate(forward.graph.nodes)}
        chosen: list[Node] = []
        left = min(self.size_bytes, self.place.budget_bytes)
        for node in sorted(saved, key=order.__getitem__):
            own = _storage(node) not in shared and holders.count(_storage(node)) == 1
            if own and _can_travel(node) and _bytes(node) <= left:
                left -= _bytes(node)
                chosen.append(node)
        return chosen

    def _leave(self, forward: GraphModule, chosen: list[Node]) -> dict[str, Node]:
        graph, nodes = forward.graph, list(forward.graph.nodes)
        starts, place = _starts(nodes, self.times.forward), {node: number for number, node in enumerate(nodes)}
        handles: dict[str, Node] = {}
        over = 0.0
        for node in chosen:
            over = max(over, starts[place[node] + 1]) + IN_TIME * _bytes(node) / self.place.link.out_bytes_per_ns
            last = max((place[user] for user in _readers(node) if user.op != "output"), default=place[node])
            after = next((number for number in range(last + 1, len(nodes)) if starts[number] >= over), len(nodes) - 1)
            with graph.inserting_after(node):
                begun = _call(graph, send, (node, self.place.where), f"{node.name}_leaving")
            with graph.inserting_before(nodes[max(after, last + 1)]):
                handles[node.name] = _call(graph, sent, (node, begun), f"{node.name}_away")
        output = graph.output_node()
        results: Any = output.args[0]
        own = {node: handles[node.name] for node in chosen}
        output.args = (type(results)(own.get(item, item) for item in results),)
        return handles

    def _come_back(self, backward: GraphModule, chosen: list[Node], handles: dict[str, Node]) -> None:
        graph, nodes = backward.graph, list(backward.graph.nodes)
        starts, place = _starts(nodes, self.times.backward), {node: number for number, node in enumerate(nodes)}
        given = {node.name: node for node in nodes if node.op == "placeholder"}
        first_op = next(number for number, node in enumerate(nodes) if node.op != "placeholder")
        uses = {node.name: min(place[user] for user in given[node.name].users) for node in chosen}
        begins, due = dict[str, int](), starts[-1]
        for node in sorted(chosen, key=lambda node: -uses[node.name]):
            use = uses[node.name]
            due = min(due, starts[use]) - IN_TIME * _bytes(node) / self.place.link.back_bytes_per_ns
            begins[node.name] = next((number for number in range(first_op, use) if starts[number] >= due), use)
        # What is read first begins first: the engine copies in the order in which it is asked.
        for node in sorted(chosen, key=lambda node: uses[node.name]):
            self._fetch(graph, given[node.name], handles[node.name], nodes[begins[node.name]], nodes[uses[node.name]])

    def _fetch(self, graph: Graph, old: Node, sent_handle: Node, begin: Node, use: Node) -> None:
        """Let `old`, which forward handed over, come back instead: begun before one node, there before another."""
        name, value = old.name, old.meta["val"]
        with graph.inserting_before(old):
            handle = graph.placeholder(sent_handle.name)
            handle.meta["val"] = sent_handle.meta["val"]
        with graph.inserting_before(begin):
            how = [*value.shape], [*value.stride()], value.dtype, value.device
            back = _call(graph, fetch, (handle, self.place.where, *how), f"{name}_back")
        with graph.inserting_before(use):
            _call(graph, fetched, (back, handle), f"{name}_arrived")
        old.replace_all_uses_with(back)
        graph.erase_node(old)


def _starts(nodes: list[Node], times: Mapping[str, float]) -> list[float]:
    """About when each node begins, and when the last one ends."""
    starts = [0.0]
    for node in nodes:
        starts.append(starts[-1] + times.get(node.name, 0.0))
    return starts


def _call(graph: Graph, op: Any, args: tuple[Any, ...], name: str) -> Node:
    node = graph.create_node("call_function", op, args, name=name)
    mode = next(_fakes(args))
    with mode:
        node.meta["val"] = op(*(item.meta["val"] if isinstance(item, Node) else item for item in args))
    return node


def _fakes(args: tuple[Any, ...]) -> Any:
    return (item.meta["val"].fake_mode for item in args if isinstance(item, Node))


def _readers(node: Node) -> list[Node]:
    """Who reads a node, or a view of it."""
    found, stack = [], [node]
    while stack:
        for user in stack.pop().users:
            found.append(user)
            if _storage(user) == _storage(node):
                stack.append(user)
    return found


def _storage(node: Any) -> int | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return storage_address(value) if isinstance(value, torch.Tensor) else None


def _can_travel(node: Node) -> bool:
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, FakeTensor) or value.layout is not torch.strided:
        return False
    return value.is_contiguous() and _bytes(node) >= LEAST_BYTES.get(value.device.type, LEAST_BYTES["cuda"])


def _bytes(node: Node) -> int:
    value = node.meta["val"]
    return int(value.numel() * value.element_size())
