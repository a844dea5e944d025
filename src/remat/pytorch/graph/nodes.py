"""What single FX nodes say of themselves, the same for eager and for compiled steps.

In: nodes of a joint graph that AOTAutograd traced, before or after a compiler's own passes. Out: the module that a node
belongs to, whether it meets other ranks, draws random numbers or writes to an input, and so whether a second run gives
the same bits. Nothing here knows of storages or kernels; that is what the readers of whole graphs add.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from remat.pytorch._compat.averaged_norm import AVERAGED_BATCH_NORM
from remat.pytorch._compat.cudnn_norm import CUDNN_BATCH_NORM
from remat.pytorch._compat.tensors import schema_of

_DEPENDS_ON_DATA = frozenset((torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output))
_COLLECTIVE_NAMESPACES = frozenset(("_dtensor", "symm_mem"))
_NO_PART_OF_A_PATH = frozenset(("", "L", "G", "_modules", "_call_impl"))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a node's fake result: itself, or the members of a tuple or list."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [member for member in value if isinstance(member, torch.Tensor)]
    return []


def is_number(node: Node) -> bool:
    """Whether a node is a number of the user's that changes from call to call, or is computed from one."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), (bool, int, float))


def module_of(node: Node) -> str:
    """`layers.3.mlp` for a node traced inside it, forward or backward; empty where unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    for bracket in ("['", "']", "[", "]"):
        path = path.replace(bracket, ".")
    parts = [part for part in path.split(".") if part not in _NO_PART_OF_A_PATH]
    # The step is called through a bound method; what comes before its module says nothing about the model.
    start = parts.index("__self__") + 1 if "__self__" in parts else int(parts[:1] == ["self"])
    return ".".join(parts[start:])


def is_tangent(node: Node) -> bool:
    """Whether a placeholder is an incoming gradient."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def is_collective(node: Node) -> bool:
    """Whether the op meets other ranks, or waits for one that does: it can only run where all of them run it."""
    namespace = getattr(node.target, "namespace", "")
    return "c10d" in namespace or namespace in _COLLECTIVE_NAMESPACES


PLANNED_TOGETHER: set[str] = set()
"""Names of the groups whose ranks run one plan where parameters are spread over them; see `remat.distributed.shard`."""


def waits_for_collective(node: Node) -> bool:
    """Whether the op gives back the tensor of a collective once it is there: it makes nothing."""
    return str(node.target) == "_c10d_functional.wait_tensor.default"


def gathers_input(node: Node, mutated: frozenset[Node]) -> bool:
    """Whether the op gathers what ranks were given, a parameter: they can do so again, where all of them run one plan.

    Any other collective has run on what ranks had computed until then, and runs once.
    """
    is_gather = str(node.target).startswith("_c10d_functional.all_gather_into_tensor.")
    if not is_gather or node.args[-1] not in PLANNED_TOGETHER:
        return False
    source = node.args[0]
    while isinstance(source, Node) and source.op == "call_function" and is_view(source):
        source = source.all_input_nodes[0]
    is_given = isinstance(source, Node) and source.op == "placeholder" and not is_tangent(source)
    return is_given and source not in mutated


def draws(node: Node) -> bool:
    """Whether the op takes numbers from a generator, as attention does where it drops out."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and not _drops_nothing(node)


def _drops_nothing(node: Node) -> bool:
    schema = schema_of(node.target)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == "dropout_p":
            given = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            return isinstance(given, int | float) and given == 0
    return False


def may_run_twice(node: Node, mutated: frozenset[Node]) -> bool:
    """Whether a second run gives the same bits, given the inputs that the step writes to."""
    schema = schema_of(node.target)
    if schema is None or schema.is_mutable or is_collective(node):
        return False
    if _DEPENDS_ON_DATA & set(getattr(node.target, "tags", ())):
        return False
    # Batch norm in training reads the running statistics only to update them; what backward needs does not depend
    # on them, so a second run gives the same bits where it counts.
    return not mutated & (set(node.all_input_nodes) - set(statistics_read(node)))


_BATCH_NORMS = (torch.ops.aten._native_batch_norm_legit_functional.default, CUDNN_BATCH_NORM)


def statistics_read(node: Node) -> tuple[Any, ...]:
    """What a batch norm that computes its statistics reads to update it: running ones, and a count of batches."""
    if node.target is AVERAGED_BATCH_NORM:
        return node.args[3:6]
    return node.args[3:5] if node.target in _BATCH_NORMS and node.args[5] is True else ()


def mutated_inputs(graph: Graph) -> frozenset[Node]:
    """Inputs that the step writes to, by a copy in the graph or after it with what the graph returns for them, and
    views of them.

    AOTAutograd leaves the copy to whoever runs the graph, unless the compiler can do it itself.
    """
    nodes = list(graph.nodes)
    copied = (node.args[0] for node in nodes if node.target is torch.ops.aten.copy_.default)
    described = {repr(node.meta.get("desc")): node for node in nodes if node.op == "placeholder"}
    targets = (getattr(desc, "mutated_input", None) for desc in nodes[-1].meta.get("desc") or ())
    returned = (described.get(repr(target)) for target in targets if target is not None)
    found = {node for node in (*copied, *returned) if isinstance(node, Node)}
    for node in nodes:
        if is_view(node) and node.all_input_nodes[0] in found:
            found.add(node)
    return frozenset(found)


def is_view(node: Node) -> bool:
    """Whether its result lies where its first argument lies, by what its op says."""
    is_marked = node.target in (operator.getitem, torch.ops.aten._unsafe_view.default) or returns_views(node.target)
    return is_marked and bool(node.all_input_nodes)


def is_computed(node: Any) -> bool:
    """Whether a node of the graph is the result of an op, and no view."""
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    maker = node.args[0] if node.target is operator.getitem else node
    return not (isinstance(maker, Node) and getattr(maker.target, "is_view", False))


def returns_views(op: Any) -> bool:
    """Whether what the op returns lies where its arguments lie, without being written to."""
    schema = schema_of(op)
    aliases = [item.alias_info for item in schema.returns] if schema is not None else []
    return any(alias is not None and not alias.is_write for alias in aliases)


def add_node(
    graph: Graph, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None = None
) -> Node:
    """As `graph.create_node`, which searches arguments for symbols, and that takes longer than all else."""
    made = graph.create_node(op, target, name=name)
    if args:
        set_field(made, "args", args)
    if kwargs:
        set_field(made, "kwargs", kwargs)
    return made


set_field = object.__setattr__
"""Sets what a node is not looked up by: a node itself would be filed anew in its graph's table each time."""


def ancestors(roots: Iterable[Any]) -> set[Node]:
    """The nodes among `roots`, and every node that they need."""
    pending = [node for node in roots if isinstance(node, Node)]
    needed: set[Node] = set()
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending.extend(node.all_input_nodes)
    return needed
