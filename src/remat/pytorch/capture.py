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
from remat.pytorch.normalize import COMPARED_ON, normalize
from remat.pytorch.overwrite import permit_overwriting

BOUNDARY = "return"
CUDA_BLOCK_BYTES = 512
"""The caching allocator hands out multiples of this."""


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
    """The value each tensor node lives on; None for parameters, buffers and inputs."""
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
        value = ValueId(len(self.sizes))
        self.sizes.append(storage_bytes(tensor, self.device))
        self.asked.append(int(tensor.untyped_storage().nbytes()) if self.sizes[-1] else 0)
        self.value_nodes.append(node)
        self.owner[_address(tensor)] = value
        return value

    def inputs_of(self, nodes: Iterable[Node]) -> tuple[ValueId, ...]:
        values = (self.base.get(node) for node in nodes)
        return tuple(dict.fromkeys(value for value in values if value is not None))


def capture(joint: GraphModule, num_forward_outputs: int, name: str = "") -> Captured:
    """Resolve storages, find where backward starts, and mark what must not run twice."""
    normalize(joint.graph, [node for node in joint.graph.nodes if is_tangent(node)])
    nodes = list(joint.graph.nodes)
    output = nodes[-1]
    forward_outputs = tuple(output.args[0][:num_forward_outputs])
    backward_outputs = tuple(output.args[0][num_forward_outputs:])
    primals = [node for node in nodes if node.op == "placeholder" and not is_tangent(node)]
    tangents = [node for node in nodes if is_tangent(node)]
    device = _device_of(nodes)
    builder = _Builder(device, {}, {}, [], [], [], [], [])
    for node in [*primals, *(node for node in nodes if node.op == "get_attr")]:
        _mark_resident(builder, node)
    mutated = _mutated_inputs(primals, output)
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


def storage_bytes(tensor: torch.Tensor, device: torch.device) -> int:
    """What a storage takes on `device`; storages elsewhere are not in its budget."""
    if tensor.device.type != device.type:
        return 0
    size = int(tensor.untyped_storage().nbytes())
    return size if device.type == "cpu" else -(-size // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a node's fake result: itself, or the members of a tuple or list."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [member for member in value if isinstance(member, torch.Tensor)]
    return []


def is_random(node: Node) -> bool:
    """Whether the op draws from a generator."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def resident_roots(captured: Captured, nodes: Iterable[Node]) -> set[Node]:
    """The placeholders behind nodes that are views of inputs or parameters."""
    found: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if captured.base.get(node, -1) is not None:
            continue
        if node.op == "placeholder":
            found.add(node)
        else:
            pending.extend(node.all_input_nodes)
    return found


def _add_node(builder: _Builder, node: Node, backward: bool, mutated: frozenset[Node], random_ops: set[OpId]) -> None:
    if node.target is operator.getitem:
        _add_getitem(builder, node)
        return
    if _is_view(builder, node):
        tensors = tensors_in(node.meta["val"])
        builder.base[node] = builder.owner[_address(tensors[0])]
        return
    if node.target is torch.ops.aten.view.default and node.args[0] in builder.base:
        # Its fake result can have a storage of its own, where tracing replaced that of its argument.
        builder.base[node] = builder.owner[_address(node.meta["val"])] = builder.base[node.args[0]]
        return
    number = OpId(len(builder.ops))
    inputs = builder.inputs_of(node.all_input_nodes)
    val = node.meta.get("val")
    single = isinstance(val, torch.Tensor)
    outputs: list[ValueId] = []
    for tensor in tensors_in(val):
        if _address(tensor) not in builder.owner:
            outputs.append(builder.new_value(tensor, node if single else None))
    if single:
        builder.base[node] = builder.owner[_address(val)]
    if is_random(node):
        random_ops.add(number)
    builder.ops.append(
        Op(
            name=node.name,
            inputs=inputs,
            outputs=tuple(outputs),
            backward=backward,
            # A random op of backward draws once, in its turn, wherever other ops of backward are moved.
            recomputable=_is_recomputable(node, mutated) and not (backward and is_random(node)),
            target=str(node.target),
            module=module_of(node),
        )
    )
    builder.op_nodes.append(node)


def _add_getitem(builder: _Builder, node: Node) -> None:
    tensors = tensors_in(node.meta.get("val"))
    if not tensors:
        return
    value = builder.owner[_address(tensors[0])]
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
            builder.base[node] = builder.new_value(val, node)
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
        builder.owner[_address(tensor)] = None


def _is_view(builder: _Builder, node: Node) -> bool:
    """Whether the op allocates nothing: everything it returns lives on storage that exists already."""
    tensors = tensors_in(node.meta.get("val"))
    schema = getattr(node.target, "_schema", None)
    if not tensors or schema is None or schema.is_mutable:
        return False
    return all(_address(tensor) in builder.owner for tensor in tensors)


def _is_recomputable(node: Node, mutated: frozenset[Node]) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable or is_collective(node):
        return False
    if torch.Tag.dynamic_output_shape in node.target.tags or torch.Tag.data_dependent_output in node.target.tags:
        return False
    # Batch norm in training reads the running statistics only to update them; what backward needs does not depend
    # on them, so a second run gives the same bits where it counts.
    return not (mutated & set(node.all_input_nodes)) or _is_training_batch_norm(node)


def _is_training_batch_norm(node: Node) -> bool:
    return node.target is torch.ops.aten._native_batch_norm_legit_functional.default and node.args[5] is True


def is_collective(node: Node) -> bool:
    """Whether the op meets other ranks, or waits for one that does: it can only run where all of them run it."""
    namespace = getattr(node.target, "namespace", "")
    return "c10d" in namespace or namespace in ("_dtensor", "symm_mem")


def _mutated_inputs(primals: list[Node], output: Node) -> frozenset[Node]:
    described = {repr(node.meta.get("desc")): node for node in primals}
    found = set()
    for desc in output.meta.get("desc") or ():
        target = getattr(desc, "mutated_input", None)
        if target is not None and repr(target) in described:
            found.add(described[repr(target)])
    return frozenset(found)


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


def _forward_length(nodes: list[Node], forward_outputs: tuple[Any, ...]) -> int:
    """The position after the last node that forward's outputs need; everything from there on is backward."""
    pending = [node for node in forward_outputs if isinstance(node, Node)]
    needed: set[Node] = set()
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending.extend(node.all_input_nodes)
    positions = [position for position, node in enumerate(nodes) if node in needed or node.op == "placeholder"]
    return max(positions, default=-1) + 1


def module_of(node: Node) -> str:
    """`layers.3.mlp` for a node traced inside it, forward or backward; empty where unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    for bracket in ("['", "']", "[", "]"):
        path = path.replace(bracket, ".")
    parts = [part for part in path.split(".") if part not in ("", "L", "G", "_modules", "_call_impl")]
    # The step is called through a bound method; what comes before its module says nothing about the model.
    start = parts.index("__self__") + 1 if "__self__" in parts else int(parts[:1] == ["self"])
    return ".".join(parts[start:])


def is_tangent(node: Node) -> bool:
    """Whether a placeholder is an incoming gradient."""
    return node.op == "placeholder" and "tangents" in str(node.target)


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


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
