"""Sizes that a compiled graph leaves open, and the largest that it is planned for.

In: a graph that Dynamo traced for many shapes. Out: inputs to compile it with, as if the first call had been of the
largest sizes: what Inductor makes runs at any, and needs most there. While a cut is chosen, every node of the joint
graph is of that size (`at_largest`); what was traced comes back before the graph is cut. What cannot be left open is
settled (`at_sizes`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from remat.inductor._compat.compiling import number_from, open_number
from remat.pytorch._compat.fakes import FakeTensorMode
from remat.pytorch._compat.symbols import Sizes, Symbols, expression_of, is_open, layout_at
from remat.pytorch._compat.trees import tree_map
from remat.pytorch.run.settings import SizesMatter

TRACED = "remat_traced"
"""Where nodes keep what was traced of them, while they are of one size."""


@dataclass(frozen=True, slots=True)
class OpenInputs:
    """What Dynamo traced of a graph's inputs, and the sizes that a plan is for."""

    traced: tuple[Any, ...]
    symbols: Symbols
    most: Sizes

    def stand_ins(self, inputs: Sequence[Any], mode: FakeTensorMode) -> tuple[list[Any], Symbols]:
        """Inputs to compile with, of the largest sizes; with the symbols that stand for these sizes in there."""
        numbers = [
            open_number(mode, f"remat_{name}", size) for name, size in zip(self.symbols.names, self.most, strict=True)
        ]
        renamed = {name: number.node.expr for name, number in zip(self.symbols.names, numbers, strict=True)}

        def opened(value: Any) -> Any:
            expression = expression_of(value)
            if isinstance(expression, int):
                return expression
            return number_from(expression.xreplace(renamed), mode, self.symbols.amount(expression, self.most))

        found: list[Any] = []
        for item, traced in zip(inputs, self.traced, strict=True):
            if isinstance(traced, torch.SymInt):
                item = opened(traced)
            elif isinstance(item, torch.Tensor) and is_open(traced):
                if expression_of(traced.storage_offset()) != 0:
                    raise SizesMatter("An input whose size is left open lies in the middle of another tensor.")
                shape, stride = map(opened, traced.shape), map(opened, traced.stride())
                with mode:
                    fake = torch.empty_strided(list(shape), list(stride), dtype=item.dtype, device=item.device)
                item = fake.requires_grad_(item.requires_grad)
            found.append(item)
        places = self.symbols.places
        return found, Symbols(tuple(renamed.values()), places, self.most, mode.shape_env)

    def further_bytes(self, inputs: Sequence[Any]) -> int:
        """By how much the inputs of the largest sizes are larger than these."""
        total = 0
        for item, traced in zip(inputs, self.traced, strict=True):
            if isinstance(item, torch.Tensor) and is_open(traced):
                shape, _, _ = layout_at(traced, lambda amount: self.symbols.amount(amount, self.most))
                total += (torch.Size(shape).numel() - item.numel()) * item.element_size()
        return max(0, total)


@contextlib.contextmanager
def at_largest(graph: Graph, symbols: Symbols | None) -> Iterator[None]:
    """Every node is of the size that it was traced with, and left open again afterwards, copies of nodes included."""
    mode = FakeTensorMode()

    def amount(expression: Any) -> int:
        assert symbols is not None, "sizes are left open by symbols"
        return symbols.amount(expression, symbols.hints)

    def settled(value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return amount(expression_of(value))
        if not isinstance(value, torch.Tensor) or not is_open(value):
            return value
        shape, stride, offset = layout_at(value, amount)
        with mode:
            room = torch.empty(_end(shape, stride, offset), dtype=value.dtype, device=value.device)
            return room.as_strided(shape, stride, offset)

    for node in graph.nodes if symbols is not None else ():
        if is_open(traced := node.meta.get("val")):
            node.meta.update({"val": tree_map(settled, traced), TRACED: traced})
    try:
        yield
    finally:
        leave_open_again(graph)


def leave_open_again(graph: Graph) -> None:
    """Nodes are as they were traced."""
    for node in graph.nodes:
        if TRACED in node.meta:
            node.meta["val"] = node.meta.pop(TRACED)


def at_sizes(module: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """A copy of a graph that Dynamo captured, of which every value is known to be as large as `inputs` make it."""
    made = GraphModule(module, copy.deepcopy(module.graph))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        _Settler(made).run(*inputs)
    return made


class _Settler(Interpreter):
    def run_node(self, n: Node) -> Any:
        n.meta["example_value"] = found = super().run_node(n)
        return found


def _end(shape: Sequence[int], stride: Sequence[int], offset: int) -> int:
    """How many elements a storage has at least."""
    if 0 in shape:
        return offset
    return offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
