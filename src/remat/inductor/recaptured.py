"""Graphs that Dynamo captures again although nothing in them has changed.

It does so where something that it looks at has, as where a model of transformers writes into its config in its first
forward. What was compiled for the graph before does for it, too: the same code on inputs of the same looks, while torch
is set as it was then (autocast, grad mode and all else that Dynamo guards on).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from remat.inductor._compat.compiling import GlobalState
from remat.inductor.graph import CompiledGraph, Ready
from remat.pytorch._compat.tensors import storage_address


@dataclass(frozen=True, slots=True)
class _Looks:
    """What decides, with torch's settings, what is compiled for a graph."""

    nodes: tuple[str, ...]
    inputs: tuple[Any, ...]

    @classmethod
    def of(cls, graph: CompiledGraph, inputs: Sequence[Any]) -> _Looks | None:
        """None where the graph holds something of its own, was given something that is no plain tensor, or leaves sizes
        open, so that more than its looks decides.
        """
        nodes = list(graph.module.graph.nodes)
        if graph.opened is not None or any(node.op in ("get_attr", "call_module") for node in nodes):
            return None
        if not all(map(_is_plain, inputs)):
            return None
        first: dict[int, int] = {}
        places = [first.setdefault(storage_address(item), place) for place, item in enumerate(inputs)]
        looks = map(_described, inputs)
        return cls(tuple(_written(nodes)), tuple(zip(looks, places, strict=True)))


def _is_plain(item: Any) -> bool:
    return type(item) in (torch.Tensor, torch.nn.Parameter) and item.layout is torch.strided


def _described(item: torch.Tensor) -> tuple[Any, ...]:
    layout = item.shape, item.stride(), item.storage_offset()
    return (*layout, item.dtype, item.device, item.requires_grad, item.is_leaf)


def _written(nodes: Sequence[Node]) -> Iterator[str]:
    """The nodes without their names: Dynamo may name an input by another way to it."""
    place = {node: f"%{number}" for number, node in enumerate(nodes)}
    for node in nodes:
        target = node.target if node.op != "placeholder" else ""
        yield repr((node.op, target, map_arg((node.args, node.kwargs), place.__getitem__)))


@dataclass(slots=True)
class Recaptured:
    """Graphs that were compiled, with what they looked like then."""

    _known: list[tuple[_Looks, GlobalState, CompiledGraph]] = field(default_factory=list)

    def note(self, graph: CompiledGraph, inputs: Sequence[Any]) -> None:
        """The graph was compiled for these inputs."""
        looks = _Looks.of(graph, inputs)
        if looks is not None:
            self._known.append((looks, GlobalState(), graph))

    def find(self, graph: CompiledGraph, inputs: Sequence[Any]) -> CompiledGraph | None:
        """A graph like this one whose planned code is there; the one that was planned last."""
        looks = _Looks.of(graph, inputs)
        for known, state, earlier in reversed(self._known):
            is_there = isinstance(earlier.state, Ready) and earlier.state.is_planned
            if is_there and earlier is not graph and known == looks and state.check():
                return earlier
        return None
