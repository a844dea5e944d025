"""A joint graph that was traced with sizes left open, as it is at certain sizes.

In: the joint graph, its `Symbols`, and sizes. Out: a copy whose nodes stand for tensors of exactly those sizes, found
by running it on fake tensors as if it had been traced there. What ops take stays open: sizes that are arguments are
computed from the graph's inputs. So all that reads a captured graph reads this one, and what is lowered from it runs
at every size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from remat.core.graph import ValueId
from remat.pytorch._compat.fakes import FakeTensorMode, fake_results_through, on_storage
from remat.pytorch._compat.modes import without_autocast, without_modes
from remat.pytorch._compat.symbols import (
    Amount,
    Sizes,
    Symbols,
    elements_amount,
    layout_at,
    storage_amount,
    symbols_of,
)
from remat.pytorch._compat.tensors import storage_address
from remat.pytorch._compat.tracing import eager_kernels_while_tracing
from remat.pytorch.device import rules_of
from remat.pytorch.graph.capture import Captured
from remat.pytorch.graph.nodes import is_tangent
from remat.pytorch.graph.open_sizes import OPEN, settle_numbers
from remat.pytorch.graph.real_results import corrected


def open_symbols(joint: GraphModule) -> Symbols | None:
    """The sizes that a traced graph leaves open; None where there are none.

    A size may come in as a number alone, where a tensor is asked for its shape and nothing else.
    """
    inputs = [node for node in joint.graph.nodes if node.op == "placeholder" and not is_tangent(node)]
    values = [node.meta.get("val") for node in joint.graph.nodes]
    return symbols_of([node.meta.get("val") for node in inputs], values)


def at_sizes(joint: GraphModule, symbols: Symbols, sizes: Sizes) -> GraphModule:
    """A copy of `joint` that stands for `sizes`."""
    graph = Graph()
    outputs = graph.graph_copy(joint.graph, {})
    original = next(iter(joint.graph.find_nodes(op="output")))
    graph.output(outputs).meta.update(original.meta)
    made = GraphModule(joint, graph)
    for node in graph.nodes:
        if "val" in node.meta:
            node.meta[OPEN] = node.meta["val"]
    with _followed():
        _take_inputs(graph, symbols, sizes)
        settle_numbers(graph)
        for node in graph.nodes:
            if node.op == "call_function":
                node.meta["val"] = _result(node)
    graph.lint()
    return made


@contextmanager
def _followed() -> Iterator[None]:
    """Ops on fake tensors meanwhile give what eager would."""
    with (
        without_modes(),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.no_grad(),
        without_autocast(),
        eager_kernels_while_tracing(),
        fake_results_through(corrected),
    ):
        yield


def _take_inputs(graph: Graph, symbols: Symbols, sizes: Sizes) -> None:
    storages: dict[int, torch.UntypedStorage] = {}

    def amount(expression: Amount) -> int:
        return symbols.amount(expression, sizes)

    for node in graph.find_nodes(op="placeholder"):
        node.meta["val"] = _input_at(node.meta.get("val"), symbols, sizes, storages, amount)


def _input_at(
    value: Any,
    symbols: Symbols,
    sizes: Sizes,
    storages: dict[int, torch.UntypedStorage],
    amount: Callable[[Amount], int],
) -> Any:
    if isinstance(value, torch.SymInt):
        return symbols.number(value, sizes)
    if not isinstance(value, torch.Tensor):
        return value
    address = storage_address(value)
    if address not in storages:
        size = amount(storage_amount(value))
        storages[address] = torch.empty(size, dtype=torch.uint8, device=value.device).untyped_storage()
    return on_storage(storages[address], value, value.device, layout_at(value, amount))


def _result(node: Node) -> Any:
    """What the node gives for what its arguments stand for."""

    def value(item: Node) -> Any:
        return item.meta["val"] if "val" in item.meta else _constant(item)

    args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
    target: Any = node.target
    return target(*args, **kwargs)


def _constant(node: Node) -> Any:
    assert node.op == "get_attr", "every other node was followed before it is read"
    return getattr(node.graph.owning_module, str(node.target))


def value_amounts(captured: Captured) -> tuple[Amount, ...]:
    """The bytes of every value, as asked for, as expressions of the open sizes.

    Of a result that was put in the place of a traced one, its elements are those of the traced one.
    """
    found: dict[ValueId, Amount] = {}
    known = _known_storages(captured)
    for op, node in zip(captured.graph.ops, captured.op_nodes, strict=True):
        if node is None:
            for item in captured.tangents():
                if (value := captured.base.get(item)) is not None and value in op.outputs:
                    found[value] = _own_amount(item.meta["val"], item.meta.get(OPEN))
            continue
        outputs = iter(op.outputs)
        for tensor, traced in _results_of(node):
            if storage_address(tensor) not in known:
                known.add(storage_address(tensor))
                found[next(outputs)] = _amount_of(tensor, traced, captured.device)
    return tuple(found[ValueId(value)] for value in range(captured.graph.value_count))


def _known_storages(captured: Captured) -> set[int]:
    resident = (node for node in captured.joint.graph.nodes if node.op in ("placeholder", "get_attr"))
    values = (node.meta.get("val") for node in resident if not is_tangent(node))
    return {storage_address(value) for value in values if isinstance(value, torch.Tensor)}


def _results_of(node: Node) -> list[tuple[torch.Tensor, Any]]:
    value, traced = node.meta.get("val"), node.meta.get(OPEN)
    values: Sequence[Any] = value if isinstance(value, (tuple, list)) else (value,)
    traced_values = traced if isinstance(traced, (tuple, list)) else (traced,) * len(values)
    pairs = zip(values, traced_values, strict=False)
    return [(item, other) for item, other in pairs if isinstance(item, torch.Tensor)]


def _amount_of(tensor: torch.Tensor, traced: Any, device: torch.device) -> Amount:
    if tensor.device.type != device.type:
        return 0
    storage = int(tensor.untyped_storage().nbytes())
    if not isinstance(traced, torch.Tensor):
        return storage
    if traced.dtype is tensor.dtype and storage != tensor.numel() * tensor.element_size():
        return storage_amount(traced)
    return elements_amount(traced) * tensor.element_size()


def _own_amount(tensor: torch.Tensor, traced: Any) -> Amount:
    """A gradient that comes in has a storage of its own."""
    elements = elements_amount(traced) if isinstance(traced, torch.Tensor) else tensor.numel()
    return elements * tensor.element_size()


def rounded_amounts(captured: Captured, asked: Sequence[int]) -> tuple[int, ...]:
    """As the device's allocator hands them out."""
    rules = rules_of(captured.device)
    return tuple(map(rules.rounded, asked))
