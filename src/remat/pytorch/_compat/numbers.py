"""Python numbers that change from call to call: inputs of Dynamo's graphs, or constants where they cannot be."""

from __future__ import annotations

import contextlib
import operator
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.source import TensorPropertySource
from torch._dynamo.symbolic_convert import InstructionTranslator, TensorifyState
from torch._dynamo.variables import builder as variable_builder
from torch.fx import GraphModule, Node

from remat.pytorch._compat.replaced import replaced, settings_changed

StartsOver = TensorifyScalarRestartAnalysis
"""Told to Dynamo: trace again, with constants in place of some numbers."""

_constants: weakref.WeakKeyDictionary[types.CodeType, set[str]] = weakref.WeakKeyDictionary()
"""For each function, where the integers come from that stay constants in its graphs."""


_fixed: weakref.WeakSet[types.CodeType] = weakref.WeakSet()
"""Functions whose graphs are traced anew for every shape."""


@contextlib.contextmanager
def changing_shapes_left_open() -> Iterator[None]:
    """A size that is not the same at every call is left open in the graphs that are traced from then on."""
    with replaced(variable_builder, "_automatic_dynamic", _shapes_followed):
        yield


def _shapes_followed(process: Any) -> Any:
    def processed(tensor: Any, translator: Any, *args: Any, **options: Any) -> Any:
        if translator.output.root_tx.f_code in _fixed:
            with _without_marks(tensor):
                return process(tensor, translator, *args, **options)
        with _following():
            return process(tensor, translator, *args, **options)

    return processed


@contextlib.contextmanager
def _without_marks(tensor: Any) -> Iterator[None]:
    marks = tensor.__dict__.pop(_MARK, None)
    try:
        yield
    finally:
        if marks is not None:
            setattr(tensor, _MARK, marks)


_MARK = "_dynamo_weak_dynamic_indices"
"""Where torch notes which sizes of a tensor are to be left open."""


def fix_shapes() -> None:
    """Have Dynamo trace again, with the sizes of this call, and so for every other shape of the same function."""
    _fixed.add(InstructionTranslator.current_tx().output.root_tx.f_code)
    raise StartsOver


@contextlib.contextmanager
def changing_numbers_as_inputs() -> Iterator[None]:
    """A number that is not the same at every call, as a count of steps or `loss.item()`, becomes an input, with guards
    on what is asked of it; shapes stay fixed. Without it such a number is a constant of the graph, which is traced anew
    for each value.
    """
    with (
        replaced(variable_builder, "process_automatic_dynamic", _floats_followed),
        replaced(variable_builder.VariableBuilder, "wrap_symint", _integers_followed),
        settings_changed(dynamo_config, allow_unspec_int_on_nn_module=True),
    ):
        yield


def _floats_followed(process: Any) -> Any:
    def processed(translator: Any, name: str, entry: Any, **options: Any) -> Any:
        with _following() if isinstance(entry.scalar, float) else contextlib.nullcontext():
            return process(translator, name, entry, **options)

    return processed


def _integers_followed(wrap: Any) -> Any:
    def wrapped(builder: Any, *args: Any, **options: Any) -> Any:
        constants = _constants.get(builder.tx.output.root_tx.f_code, ())
        with contextlib.nullcontext() if _name_of(builder.source) in constants else _following():
            return wrap(builder, *args, **options)

    return wrapped


def _following() -> Any:
    return settings_changed(dynamo_config, automatic_dynamic_shapes=True)


def _name_of(source: Any) -> str:
    """Where Dynamo found something, as `L['step']`."""
    return str(source.name() if callable(source.name) else source.name)


def changes_shapes(module: GraphModule) -> bool:
    """Whether the size of a tensor depends on a number that changes."""
    values = (node.meta.get("example_value") for node in module.graph.nodes)
    tensors = (value for value in values if isinstance(value, torch.Tensor) and value.layout is torch.strided)
    return any(isinstance(size, torch.SymInt) for value in tensors for size in (*value.shape, *value.stride()))


def make_numbers_constant(
    module: GraphModule, *, may_stay: Callable[[Node], bool] = lambda node: not node.users
) -> None:
    """Have Dynamo trace again, with constants in place of integers, and of floats but those that may stay; go on where
    the graph has none. Nothing speaks against a float that is only asked about.
    """
    integers = set(_integers(module))
    if integers:
        code = InstructionTranslator.current_tx().output.root_tx.f_code
        _constants.setdefault(code, set()).update(integers)
    nodes = (node for part in module.modules() if isinstance(part, GraphModule) for node in part.graph.nodes)
    taken = [_value(node) for node in nodes if node.target == "item" and not may_stay(node)]
    floats = [str(value.node.expr) for value in taken if isinstance(value, torch.SymFloat)]
    for name in floats:
        TensorifyState.specialize(name)
    if floats or integers:
        raise StartsOver


def is_only_counted_with(node: Node) -> bool:
    """Whether a number is only added, multiplied and divided by: compilers make a tensor of such a one."""
    return all(
        user.target in _ARITHMETIC and (isinstance(_value(user), torch.Tensor) or is_only_counted_with(user))
        for user in node.users
    )


_ARITHMETIC = frozenset((operator.add, operator.sub, operator.mul, operator.truediv, operator.neg))


def _integers(module: GraphModule) -> Iterator[str]:
    """Where the graph's integers come from; the sizes of tensors that it gets are none."""
    for node in module.graph.find_nodes(op="placeholder"):
        source = getattr(node.meta.get("grapharg"), "source", None)
        if isinstance(_value(node), torch.SymInt) and not isinstance(source, TensorPropertySource):
            yield _name_of(source)


def _value(node: Node) -> Any:
    return node.meta.get("example_value")


def when_traced(value: Any) -> Any:
    """What a number was in the call that was traced; anything else as it is."""
    return value.node.hint if isinstance(value, torch.SymFloat | torch.SymInt | torch.SymBool) else value
