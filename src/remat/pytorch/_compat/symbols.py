"""Sizes that torch traced as symbols: what they were, where a call tells them, and what they make of an expression.

In: a joint graph that was traced for many shapes. Out: its symbols, amounts as expressions of them, and nodes that
compute an expression from a graph's inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._dynamo import maybe_mark_dynamic
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import OptimizedPythonReferenceAnalysis

from remat.pytorch._compat.fakes import FakeTensorMode, on_storage
from remat.pytorch._compat.numbers import when_traced

Sizes = tuple[int, ...]
"""One number for each symbol of a graph."""
Amount = Any
"""A whole number, or an expression of symbols for one."""


@dataclass(frozen=True)
class Symbols:
    """The sizes that a traced graph leaves open."""

    names: tuple[Any, ...]
    places: tuple[tuple[int, int | None], ...]
    """For each, the input that tells it: as a number, or as its size along a dimension."""
    hints: Sizes
    """What they were in the call that was traced."""
    shape_env: Any

    def read(self, inputs: Sequence[Any]) -> Sizes:
        """What they are in the call with these inputs."""
        return tuple(int(inputs[place]) if dim is None else int(inputs[place].shape[dim]) for place, dim in self.places)

    def amount(self, expression: Amount, sizes: Sizes) -> int:
        """What an expression comes to."""
        if isinstance(expression, int):
            return expression
        return int(_at(expression, self.names, sizes))

    def number(self, value: Any, sizes: Sizes) -> int:
        """What a symbolic number is."""
        return self.amount(expression_of(value), sizes)

    def may_be(self, sizes: Sizes) -> bool:
        """Whether all that tracing took for granted holds at these sizes."""
        known = dict(zip(self.names, map(sympy.Integer, sizes), strict=True))
        for name, size in zip(self.names, sizes, strict=True):
            if size not in self.shape_env.var_to_range[name]:
                return False
        facts = (guard.expr.xreplace(known) for guard in self.shape_env.guards)
        return all(fact == sympy.true for fact in facts if not fact.free_symbols)


@functools.lru_cache(maxsize=100_000)
def _at(expression: Any, names: tuple[Any, ...], sizes: Sizes) -> Any:
    return expression.xreplace(dict(zip(names, map(sympy.Integer, sizes), strict=True)))


def expression_of(number: Any) -> Amount:
    """A whole number as it is, a symbolic one as its expression."""
    if not isinstance(number, torch.SymInt):
        return int(number)
    found = number.node.expr
    return int(found) if found.is_Integer else found


def is_open(value: Any) -> bool:
    """Whether a traced value is, or has a size or stride that is, left open."""
    if isinstance(value, torch.SymInt):
        return not isinstance(expression_of(value), int)
    if isinstance(value, torch.Tensor):
        numbers = (*value.shape, *value.stride(), value.storage_offset())
        return any(isinstance(item, torch.SymInt) for item in numbers)
    return isinstance(value, (tuple, list)) and any(map(is_open, value))


def has_open_inputs(module: GraphModule) -> bool:
    """Whether Dynamo left sizes or numbers open that its graph is given."""
    values = (node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder"))
    return any(isinstance(value, torch.SymInt | torch.SymFloat) or is_open(value) for value in values)


def leave_open(tensor: torch.Tensor, dim: int) -> None:
    """Have a size of a tensor left open where it is traced, if nothing depends on it."""
    maybe_mark_dynamic(tensor, dim)


def as_called(value: Any) -> Any:
    """What a traced value was in the call that was traced, sizes that are left open included; no guard comes of it."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(as_called, value)) if is_open(value) else value
    if isinstance(value, torch.SymInt):
        return when_traced(value)
    if not isinstance(value, torch.Tensor) or not is_open(value):
        return value
    with FakeTensorMode():
        size = when_traced(value.untyped_storage().nbytes())
        storage = torch.empty(size, dtype=torch.uint8, device=value.device).untyped_storage()
        shape, stride = ([when_traced(item) for item in numbers] for numbers in (value.shape, value.stride()))
        return on_storage(storage, value, value.device, (shape, stride, when_traced(value.storage_offset())))


def symbols_of(inputs: Sequence[Any], results: Iterable[Any] = ()) -> Symbols | None:
    """Of a graph that takes inputs as these were traced, and has these results of its nodes; None where no size is
    open, or one is told by none of the inputs.
    """
    places: dict[Any, tuple[int, int | None]] = {}
    # A number that is no size of anything, as a count of steps, says nothing of shapes.
    used = {name for value in results for name in _sizes_in(value)}
    env = None
    for expression, number, place in _told(inputs):
        used |= expression.free_symbols if place[1] is not None else set()
        env = number.node.shape_env
        if expression.is_Symbol and (expression not in places or place[1] is None):
            places[expression] = place
    places = {name: place for name, place in places.items() if name in used}
    if not used or used - places.keys() or env is None:
        return None
    names = tuple(sorted(places, key=lambda name: (places[name][0], str(name))))
    hints = tuple(int(_hint(env, name)) for name in names)
    return Symbols(names, tuple(places[name] for name in names), hints, env)


def _sizes_in(value: Any) -> set[Any]:
    """The symbols in the sizes of traced tensors."""
    if isinstance(value, (tuple, list)):
        return {name for item in value for name in _sizes_in(item)}
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    return {name for size in sizes if isinstance(size, torch.SymInt) for name in size.node.expr.free_symbols}


def _told(inputs: Sequence[Any]) -> Iterator[tuple[Any, Any, tuple[int, int | None]]]:
    for place, value in enumerate(inputs):
        if isinstance(value, torch.SymInt):
            dims: Iterable[tuple[int | None, Any]] = [(None, value)]
        else:
            dims = enumerate(value.shape) if isinstance(value, torch.Tensor) else ()
        for dim, number in dims:
            expression = expression_of(number)
            if not isinstance(expression, int):
                yield expression, number, (place, dim)


def _hint(env: Any, name: Any) -> Any:
    """What a symbol stood for; versions of torch keep it under other names."""
    for known in ("backed_var_to_val", "var_to_val"):
        found = getattr(env, known, {}).get(name)
        if found is not None:
            return found
    raise KeyError(f"torch keeps no value of {name}")


def layout_at(value: torch.Tensor, amount: Callable[[Amount], int]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape, strides and offset of a traced tensor, with every size known."""

    def known(numbers: Iterable[Any]) -> tuple[int, ...]:
        return tuple(amount(expression_of(number)) for number in numbers)

    return known(value.shape), known(value.stride()), amount(expression_of(value.storage_offset()))


def storage_amount(value: torch.Tensor) -> Amount:
    """The bytes of a traced tensor's storage."""
    return expression_of(value.untyped_storage().nbytes())


def elements_amount(value: torch.Tensor) -> Amount:
    """How many elements a traced tensor has."""
    found: Any = sympy.Integer(1)
    for size in value.shape:
        found *= expression_of(size)
    return int(found) if found.is_Integer else found


def node_for(graph: Graph, expression: Amount, told: Mapping[Any, Node]) -> Any:
    """A node that computes `expression` from nodes that tell its symbols; whole numbers stay as they are."""
    if isinstance(expression, int):
        return expression
    tracer = GraphAppendingTracer(graph)
    known: dict[Any, Any] = {name: Proxy(node, tracer) for name, node in told.items()}
    return sympy_interp(OptimizedPythonReferenceAnalysis, known, expression).node
