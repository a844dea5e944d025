"""Which ops can write their result into one of their arguments, and how they are called then.

In: a captured graph and its FX nodes. Out: `Op.overwrites` for each op, and the call that overwrites. A result may go
into an argument of the same dtype, shape, strides and storage. Pointwise ops read each element before they write it;
those of `_ROW_WISE` read a whole row before they write any of it. An `out=` form runs the same kernel as the functional
one, so it gives the same bits. Forms that torch generates from functional ones allocate and copy: no use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from remat.core.graph import Graph, Op, OpId, ValueId
from remat.pytorch import ops as _ops  # noqa: F401  defines the ops of `torch.ops.remat`
from remat.pytorch._compat.tensors import overload_name, schema_of, storage_address
from remat.pytorch.graph.real_results import overwrites_exactly

aten = torch.ops.aten

_ROW_WISE = (
    aten._log_softmax.default,
    aten._softmax.default,
    aten._log_softmax_backward_data.default,
    aten._softmax_backward_data.default,
)
_UNTAGGED = (aten.hardtanh_backward.default, aten.leaky_relu_backward.default, aten.elu_backward.default)
"""Pointwise, though torch does not say so."""
_OURS = (torch.ops.remat.cross_entropy_backward.default, torch.ops.remat.relu_backward.default)
_SAFE = frozenset((*_ROW_WISE, *_UNTAGGED, *_OURS))
_PARTLY = frozenset(
    {
        *(aten.index_put.default, aten.index_add.default, aten.index_copy.default, aten.scatter_add.default),
        *(aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.index_fill.int_Tensor),
        *(aten.index_fill.int_Scalar, aten.masked_scatter.default, aten.index_reduce.default),
        *(aten.scatter_reduce.two, aten.slice_scatter.default, aten.select_scatter.default),
    }
)
"""They return their first argument with some elements changed; eager mostly changes it in place."""
_TRUSTED = ("aten", "prims", "remat")
"""Whose results share no storage that their fake versions do not show."""


def permit_overwriting(
    graph: Graph,
    op_nodes: Sequence[Node | None],
    value_nodes: Sequence[Node | None],
    base: Mapping[Node, ValueId | None],
    returned: Iterable[ValueId],
) -> Graph:
    """`graph` with every op told which inputs it may overwrite: storages that only this graph's ops can see."""
    seen = frozenset(returned)
    producers, consumers = graph.producers(), graph.consumers()
    owned = {value for value in range(graph.value_count) if _is_trusted(op_nodes[producers[value]])}
    owned -= {*graph.outputs, *seen}
    owned -= {value for op, node in zip(graph.ops, op_nodes, strict=True) if _may_alias(node) for value in op.inputs}
    ops: list[Op] = []
    for number, (op, node) in enumerate(zip(graph.ops, op_nodes, strict=True)):
        found: list[ValueId] = []
        if node is not None and len(op.outputs) == 1 and base.get(node) == op.outputs[0]:
            for argument in overwritable(node):
                value = base.get(argument)
                # A caller who is handed a view could not change it in place.
                is_whole = op.outputs[0] not in seen or argument is value_nodes[value or 0]
                if value is not None and value in owned and is_whole:
                    found.append(value)
        may = (value for value in found if not _is_read_after(graph, consumers, OpId(number), consumers[value]))
        ops.append(replace(op, overwrites=tuple(dict.fromkeys(may))))
    return replace(graph, ops=tuple(ops))


def _is_trusted(node: Node | None) -> bool:
    return node is not None and getattr(node.target, "namespace", "") in _TRUSTED and not _may_alias(node)


def _may_alias(node: Node | None) -> bool:
    """Whether what the op returns may share storage with what it reads, though it counts as an op that allocates."""
    schema = schema_of(getattr(node, "target", None))
    return schema is None or any(result.alias_info is not None for result in schema.returns)


def _is_read_after(graph: Graph, consumers: Sequence[Sequence[OpId]], op: OpId, readers: Sequence[OpId]) -> bool:
    """Whether a reader can only run after `op`: a later one where `op` is of forward, or one that needs its result."""
    later = [reader for reader in readers if reader > op]
    if not later:
        return False
    if not graph.ops[op].backward:
        return True
    needed, pending = {op}, [op]
    while pending:
        for value in graph.ops[pending.pop()].outputs:
            for reader in consumers[value]:
                if reader <= later[-1] and reader not in needed:
                    if reader in later:
                        return True
                    needed.add(reader)
                    pending.append(reader)
    return False


def overwritable(node: Node) -> list[Node]:
    """The arguments of `node` into which its result can go, if nothing reads them later; mostly the first."""
    result = node.meta.get("val")
    if not isinstance(result, torch.Tensor) or not hasattr(node.target, "overloadpacket"):
        return []
    partly = node.target in _PARTLY
    if node.target not in _SAFE and not partly and torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return []
    forms = _forms(node.target)
    found = [
        argument
        for place, argument in enumerate(node.args[:1] if partly else node.args)
        if isinstance(argument, Node) and (forms.out is not None or (forms.in_place is not None and place == 0))
        if _has_place_for(argument.meta.get("val"), result) and not _is_seen_otherwise(node, argument)
        if _gives_the_same(node, place)
    ]
    return list(dict.fromkeys(found))


def _gives_the_same(node: Node, place: int) -> bool:
    """Some kernels ignore the strides of what they are given to write into: the real ones are asked."""
    target: Any = node.target

    def value(item: Node) -> Any:
        return item.meta.get("val")

    def overwriting(args: list[Any], kwargs: dict[str, Any], into: torch.Tensor) -> Any:
        form, args_, kwargs_ = overwriting_call(target, tuple(args), kwargs, into)
        return form(*args_, **kwargs_)

    return overwrites_exactly(target, map_arg(node.args, value), map_arg(node.kwargs, value), place, overwriting)


def overwriting_call(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], into: Any
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The call of `target` that writes its result into `into`, one of `args`."""
    forms = _forms(target)
    if forms.out is not None:
        return forms.out, args, {**kwargs, forms.out_name: into}
    return forms.in_place, args, kwargs


class _Forms:
    """The overloads of an op that write into a tensor they are given."""

    __slots__ = ("in_place", "out", "out_name")

    def __init__(self, target: Any) -> None:
        self.out, self.out_name = None, ""
        for name in () if target in _PARTLY else target.overloadpacket.overloads():
            candidate = getattr(target.overloadpacket, name)
            written = [argument for argument in schema_of(candidate).arguments if argument.is_out]
            if len(written) == 1 and _is_real(candidate) and _takes_the_same(candidate, target):
                self.out, self.out_name = candidate, written[0].name
        self.in_place = _in_place_form(target)


@cache
def _forms(target: Any) -> _Forms:
    return _Forms(target)


def _into_slice(self: torch.Tensor, src: torch.Tensor, *where: Any, **named: Any) -> torch.Tensor:
    aten.slice.Tensor(self, *where, **named).copy_(src)
    return self


def _into_row(self: torch.Tensor, src: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    self.select(dim, index).copy_(src)
    return self


_WRITTEN_OUT = {aten.slice_scatter.default: _into_slice, aten.select_scatter.default: _into_row}
"""In-place forms that torch has no op for."""


def _in_place_form(target: Any) -> Any:
    if target in _WRITTEN_OUT:
        return _WRITTEN_OUT[target]
    packet = getattr(getattr(torch.ops, target.namespace), f"{schema_of(target).name.split('::')[1]}_", None)
    found = getattr(packet, overload_name(target), None)
    # With numbers as operands the two forms round differently: `mul.Scalar` and `mul_.Scalar` do in bfloat16.
    rounds = target not in _PARTLY and any(str(item.type) == "number" for item in schema_of(target).arguments)
    if found is None or rounds:
        return None
    return found if _is_real(found) and _takes_the_same(found, target) else None


def _is_real(overload: Any) -> bool:
    return torch.Tag.generated not in overload.tags


def _takes_the_same(overload: Any, target: Any) -> bool:
    def described(schema: Any) -> list[tuple[str, str]]:
        # Types are compared without the marks of what is written to.
        return [(item.name, str(item.type)) for item in schema.arguments if not item.is_out]

    return described(schema_of(overload)) == described(schema_of(target))


def _has_place_for(argument: Any, result: torch.Tensor) -> bool:
    return (
        isinstance(argument, torch.Tensor)
        and argument.dtype is result.dtype
        and argument.device == result.device
        and argument.layout is result.layout is torch.strided
        and argument.shape == result.shape
        and argument.stride() == result.stride()
        and argument.storage_offset() == result.storage_offset() == 0
        and argument.untyped_storage().nbytes() == result.untyped_storage().nbytes()
    )


def _is_seen_otherwise(node: Node, argument: Node) -> bool:
    """Whether another argument looks at the same storage in another order, as `x + x.T` does."""
    own = argument.meta["val"]
    address = storage_address(own)
    for other in node.all_input_nodes:
        value = other.meta.get("val")
        if isinstance(value, torch.Tensor) and storage_address(value) == address:
            same = value.shape == own.shape and value.stride() == own.stride() and value.dtype is own.dtype
            if not same or value.storage_offset() != own.storage_offset():
                return True
    return False
