"""A joint forward-and-backward FX graph becomes a `Graph` of storages.

In: the joint graph that AOTAutograd traces (functional, fake tensors only). Out: a `Captured`, which holds the
solver's view (`graph`, `size_bytes`) and the way back from ops and values to FX nodes.

Views own nothing: they belong to the value or resident tensor they look at and are made again where needed.
Between forward and backward stands one op, the *boundary*: it reads what forward returns, and produces the
incoming gradients. It stands for everything that happens outside the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from remat.core.graph import Graph, Op, OpId, ValueId
from remat.errors import CaptureError
from remat.pytorch._compat.numbers import when_traced
from remat.pytorch._compat.tensors import schema_of, storage_address
from remat.pytorch.device import rules_of
from remat.pytorch.graph.nodes import (
    ancestors,
    draws,
    gathers_input,
    is_number,
    is_tangent,
    is_view,
    may_run_twice,
    module_of,
    mutated_inputs,
    statistics_read,
    tensors_in,
    waits_for_collective,
)
from remat.pytorch.graph.normalize import COMPARED_ON, normalize
from remat.pytorch.graph.overwrite import permit_overwriting
from remat.pytorch.graph.shared_casts import share_recurrent_casts

BOUNDARY = "return"


@dataclass(frozen=True, slots=True)
class Captured:
    """One captured graph and the way back from the solver's ids to FX nodes."""

    joint: GraphModule
    graph: Graph
    size_bytes: tuple[int, ...]
    asked_bytes: tuple[int, ...]
    """The same before the device's allocator rounds them up."""
    op_nodes: tuple[Node | None, ...]
    """The FX node that each op runs; None for the boundary."""
    value_nodes: tuple[Node | None, ...]
    """The FX node that holds the whole storage of each value; None where nothing reads it."""
    base: dict[Node, ValueId | None]
    """The value each tensor node lives on; None for parameters, buffers and inputs, and for numbers made of these."""
    boundary: OpId
    forward_outputs: tuple[Any, ...]
    backward_outputs: tuple[Any, ...]
    random_ops: frozenset[OpId]
    mutated: frozenset[Node]
    """Inputs that the step updates once, after forward (batch norm's running statistics)."""
    device: torch.device

    def inputs(self) -> list[Node]:
        """What forward takes, in order."""
        return [node for node in self.joint.graph.nodes if node.op == "placeholder" and not is_tangent(node)]

    def tangents(self) -> list[Node]:
        """The incoming gradients that backward takes, in order."""
        return [node for node in self.joint.graph.nodes if is_tangent(node)]


@dataclass(slots=True)
class _Builder:
    """Values and ops as they are met, in graph order."""

    device: torch.device
    base: dict[Node, ValueId | None]
    owner: dict[int, ValueId | None]
    """Storage address to the value that owns it; None for resident storages."""
    sizes: list[int]
    asked: list[int]
    value_nodes: list[Node | None]
    ops: list[Op]
    op_nodes: list[Node | None]

    def new_value(self, tensor: torch.Tensor, node: Node | None) -> ValueId:
        return self._add_value(tensor, node, int(tensor.untyped_storage().nbytes()))

    def new_tangent(self, tensor: torch.Tensor, node: Node) -> ValueId:
        # Traced from the output, whose storage may be larger than its elements; a gradient has its own.
        return self._add_value(tensor, node, tensor.numel() * tensor.element_size())

    def _add_value(self, tensor: torch.Tensor, node: Node | None, size_bytes: int) -> ValueId:
        value = ValueId(len(self.sizes))
        is_here = tensor.device.type == self.device.type
        self.sizes.append(rules_of(self.device).rounded(size_bytes) if is_here else 0)
        self.asked.append(size_bytes if is_here else 0)
        self.value_nodes.append(node)
        self.owner[storage_address(tensor)] = value
        return value

    def inputs_of(self, nodes: Iterable[Node]) -> tuple[ValueId, ...]:
        values = (self.base.get(node) for node in nodes)
        return tuple(dict.fromkeys(value for value in values if value is not None))


def capture(joint: GraphModule, num_forward_outputs: int, name: str = "") -> Captured:
    """Resolve storages, find where backward starts, and mark what must not run twice."""
    _take_numbers_as_they_were(joint)
    _share_casts(joint, num_forward_outputs)
    normalize(joint.graph, [node for node in joint.graph.nodes if is_tangent(node)])
    nodes = list(joint.graph.nodes)
    output = nodes[-1]
    forward_outputs = tuple(output.args[0][:num_forward_outputs])
    nodes = _forward_first(nodes, forward_outputs)
    backward_outputs = tuple(output.args[0][num_forward_outputs:])
    primals = [node for node in nodes if node.op == "placeholder" and not is_tangent(node)]
    tangents = [node for node in nodes if is_tangent(node)]
    device = _device_of(nodes)
    builder = _Builder(device, {}, {}, [], [], [], [], [])
    for node in [*primals, *(node for node in nodes if node.op == "get_attr")]:
        _mark_resident(builder, node)
    mutated = mutated_inputs(joint.graph)
    split = _forward_length(nodes, forward_outputs)
    random_ops: set[OpId] = set()
    boundary = OpId(-1)
    for position, node in enumerate(nodes):
        if position == split:
            boundary = _add_boundary(builder, forward_outputs, tangents)
        if node.op == "call_function":
            _add_node(builder, node, position >= split, mutated, random_ops)
    if boundary < 0:
        boundary = _add_boundary(builder, forward_outputs, tangents)
    kept = _user_outputs(forward_outputs, output)
    builder.ops[:] = _pin_producers(builder, kept)
    outputs = builder.inputs_of(
        node for node in (*kept, *_held_tangents(tangents), *backward_outputs) if isinstance(node, Node)
    )
    returned = builder.inputs_of(node for node in (*forward_outputs, *backward_outputs) if isinstance(node, Node))
    graph = Graph(tuple(builder.ops), len(builder.sizes), outputs, name)
    if device.type in COMPARED_ON:
        graph = permit_overwriting(graph, builder.op_nodes, builder.value_nodes, builder.base, returned)
    return Captured(
        joint=joint,
        graph=graph,
        size_bytes=tuple(builder.sizes),
        asked_bytes=tuple(builder.asked),
        op_nodes=tuple(builder.op_nodes),
        value_nodes=tuple(builder.value_nodes),
        base=builder.base,
        boundary=boundary,
        forward_outputs=forward_outputs,
        backward_outputs=backward_outputs,
        random_ops=frozenset(random_ops),
        mutated=mutated,
        device=device,
    )


def _take_numbers_as_they_were(joint: GraphModule) -> None:
    """What an op costs does not depend on a number that changes: it is asked with that of the first call."""
    for node in joint.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = when_traced(node.meta["val"])


def _share_casts(joint: GraphModule, num_forward_outputs: int) -> None:
    *nodes, output = joint.graph.nodes
    primals = [node for node in nodes if node.op == "placeholder" and not is_tangent(node)]
    share_recurrent_casts(joint.graph, primals, output.args[0][num_forward_outputs:])


def with_held_tangents(captured: Captured) -> Captured:
    """The same where incoming gradients live to the end, whoever reads them."""
    tangents = captured.graph.ops[captured.boundary].outputs
    outputs = tuple(dict.fromkeys((*captured.graph.outputs, *tangents)))
    return replace(captured, graph=replace(captured.graph, outputs=outputs))


def updated_and_read(captured: Captured) -> frozenset[int]:
    """Numbers of the inputs that the step updates and whose old contents gradients depend on."""
    pending = [node for node in captured.backward_outputs if isinstance(node, Node)]
    seen: set[Node] = set()
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending.extend(item for item in node.all_input_nodes if item not in statistics_read(node))
    return frozenset(place for place, node in enumerate(captured.inputs()) if node in captured.mutated and node in seen)


def resident_roots(captured: Captured, nodes: Iterable[Node]) -> set[Node]:
    """The placeholders behind nodes that are views of inputs or parameters, or that views take their sizes from."""
    found: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if captured.base.get(node, -1) is not None:
            pending.extend(node.all_input_nodes if node.op == "call_function" and is_view(node) else ())
        elif node.op == "placeholder":
            found.add(node)
        else:
            pending.extend(node.all_input_nodes)
    return found


def _add_node(builder: _Builder, node: Node, backward: bool, mutated: frozenset[Node], random_ops: set[OpId]) -> None:
    if node.target is operator.getitem:
        _add_getitem(builder, node)
        return
    if is_number(node):
        builder.base[node] = None
        return
    if _is_view(builder, node):
        tensors = tensors_in(node.meta["val"])
        builder.base[node] = builder.owner[storage_address(tensors[0])]
        return
    same = node.target is torch.ops.aten.view.default or waits_for_collective(node)
    if same and node.args[0] in builder.base:
        # Its fake result can have a storage of its own, where tracing replaced that of its argument.
        builder.base[node] = builder.owner[storage_address(node.meta["val"])] = builder.base[node.args[0]]
        return
    number = OpId(len(builder.ops))
    inputs = builder.inputs_of(node.all_input_nodes)
    val = node.meta.get("val")
    single = isinstance(val, torch.Tensor)
    outputs: list[ValueId] = []
    for tensor in tensors_in(val):
        if storage_address(tensor) not in builder.owner:
            outputs.append(builder.new_value(tensor, node if single else None))
    if single:
        builder.base[node] = builder.owner[storage_address(val)]
    if draws(node):
        random_ops.add(number)
    builder.ops.append(
        Op(
            name=node.name,
            inputs=inputs,
            outputs=tuple(outputs),
            backward=backward,
            # A random op of backward draws once, in its turn, wherever other ops of backward are moved.
            recomputable=(may_run_twice(node, mutated) and not (backward and draws(node)))
            or gathers_input(node, mutated),
            target=str(node.target),
            module=module_of(node),
        )
    )
    builder.op_nodes.append(node)


def _add_getitem(builder: _Builder, node: Node) -> None:
    tensors = tensors_in(node.meta.get("val"))
    if not tensors:
        return
    value = builder.owner[storage_address(tensors[0])]
    builder.base[node] = value
    if value is not None and builder.value_nodes[value] is None:
        builder.value_nodes[value] = node


def _add_boundary(builder: _Builder, forward_outputs: tuple[Any, ...], tangents: list[Node]) -> OpId:
    number = OpId(len(builder.ops))
    inputs = builder.inputs_of(node for node in forward_outputs if isinstance(node, Node))
    outputs = []
    for node in tangents:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and node.users:
            builder.base[node] = builder.new_tangent(val, node)
            outputs.append(builder.base[node])
    builder.ops.append(
        Op(BOUNDARY, inputs, tuple(value for value in outputs if value is not None), False, recomputable=False)
    )
    builder.op_nodes.append(None)
    return number


def _mark_resident(builder: _Builder, node: Node) -> None:
    builder.base[node] = None
    if node.op == "get_attr" and "val" not in node.meta:
        node.meta["val"] = getattr(node.graph.owning_module, str(node.target))
    for tensor in tensors_in(node.meta.get("val")):
        builder.owner[storage_address(tensor)] = None


def _is_view(builder: _Builder, node: Node) -> bool:
    """Whether the op allocates nothing: everything it returns lives on storage that exists already."""
    tensors = tensors_in(node.meta.get("val"))
    schema = schema_of(node.target)
    if not tensors or schema is None or schema.is_mutable:
        return False
    return all(storage_address(tensor) in builder.owner for tensor in tensors)


def _user_outputs(forward_outputs: tuple[Any, ...], output: Node) -> tuple[Any, ...]:
    """What the caller holds after forward; updates of mutated inputs are copied and dropped."""
    descs = output.meta.get("desc") or (None,) * len(forward_outputs)
    pairs = zip(forward_outputs, descs, strict=False)
    return tuple(node for node, desc in pairs if getattr(desc, "mutated_input", None) is None)


def _held_tangents(tangents: list[Node]) -> list[Node]:
    """Gradients of a loss: whoever calls backward makes them and holds them until it returns."""
    return [node for node in tangents if node.users and node.meta["val"].numel() == 1]


def _pin_producers(builder: _Builder, kept: tuple[Any, ...]) -> list[Op]:
    """What the caller holds stays in memory anyway: running its op again could only cost."""
    held = set(builder.inputs_of(node for node in kept if isinstance(node, Node)))
    return [replace(op, recomputable=False) if held & set(op.outputs) else op for op in builder.ops]


def _forward_first(nodes: list[Node], forward_outputs: tuple[Any, ...]) -> list[Node]:
    """The same nodes where what forward's outputs need comes before what reads an incoming gradient.

    An output that is an alias (a detached tensor, a view of one that was changed in place) is made last of all.
    """
    needed = ancestors(forward_outputs)
    first = next((place for place, node in enumerate(nodes) if any(map(is_tangent, node.all_input_nodes))), len(nodes))
    late = [node for node in nodes[first:] if node in needed]
    return [*nodes[:first], *late, *(node for node in nodes[first:] if node not in needed)]


def _forward_length(nodes: list[Node], forward_outputs: tuple[Any, ...]) -> int:
    """The position after the last node that forward's outputs need; everything from there on is backward."""
    needed = ancestors(forward_outputs)
    positions = [position for position, node in enumerate(nodes) if node in needed or node.op == "placeholder"]
    return max(positions, default=-1) + 1


def _device_of(nodes: list[Node]) -> torch.device:
    found: set[torch.device] = set()
    for node in nodes:
        found.update(tensor.device for tensor in tensors_in(node.meta.get("val")))
    accelerators = sorted((device for device in found if device.type != "cpu"), key=str)
    if len(accelerators) > 1:
        raise CaptureError(
            f"One graph uses {', '.join(map(str, accelerators))}; Remat plans one device: put each part on its own."
        )
    return accelerators[0] if accelerators else torch.device("cpu")
