"""A joint graph as a compiler sees it: which nodes fuse, which run alone, which are only views, and how large they are.

In: AOTAutograd's joint graph after Inductor's own passes. Out: a `Joint`, plain data without torch: nodes in order,
each with its kind, the nodes it reads, the storage it makes, and whether it belongs to the forward or the backward.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch.fx import GraphModule, Node

from remat.inductor._compat.compiling import is_functionalized, op_name, runs_alone
from remat.pytorch.graph.nodes import (
    ancestors,
    draws,
    is_tangent,
    may_run_twice,
    module_of,
    mutated_inputs,
    returns_views,
    tensors_in,
)

_SUMS = frozenset(
    (
        *("sum", "mean", "amax", "amin", "max", "min", "var", "var_mean", "std", "prod", "any", "all", "argmax"),
        *("argmin", "norm", "linalg_vector_norm", "logsumexp", "cumsum", "cumprod", "prepare_softmax_online"),
    )
)
_VIEWS_UNMARKED = frozenset(("_unsafe_view", "reshape"))
_FILLED = frozenset(
    ("full", "full_like", "zeros", "ones", "scalar_tensor", "iota", "empty", "zeros_like", "ones_like", "arange")
)
_WINDOWS = ("pool", "upsample")
"""Parts of the names of ops that read most elements several times."""
_PICKS = frozenset(
    ("gather", "index", "index_select", "_unsafe_index", "_unsafe_masked_index", "embedding", "flip", "rev", "roll")
)
_HEAVY = frozenset(("exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh"))
_SLOW = _HEAVY | {"erf", "erfc"}
_SEEDS = frozenset(("inductor_seed", "inductor_seeds"))
_CONCATENATED = ".cat."
_IN_PIECES = (_CONCATENATED, "index_put", "scatter", "remat.settled")


class Kind(Enum):
    """How a node runs in compiled code."""

    INPUT = "input"
    """There when the step begins, and held by the caller."""
    VIEW = "view"
    """Another look at a storage that exists."""
    FUSED = "fused"
    """Part of a kernel made for it and its neighbours: in memory only where somebody outside the kernel reads it."""
    SUM = "sum"
    """A reduction: fused with what it reads, and in memory itself."""
    ALONE = "alone"
    """A kernel of its own: matmuls, convolutions, attention."""


class Half(Enum):
    FORWARD = "forward"
    """The forward's outputs need it."""
    FREE = "free"
    """Needed in backward only, though it needs no gradient: it can run in either."""
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class JointNode:
    """One node. A tensor that an op returns among several is a node that reads the op."""

    name: str
    target: str
    kind: Kind
    phase: Half
    reads: tuple[int, ...]
    """The nodes that it takes, by number."""
    owner: int
    """The node whose storage its result lies in; itself where it makes one."""
    size_bytes: int
    """Of the storage that it makes; 0 for views and for ops that return several tensors."""
    elements: int
    recomputable: bool
    is_part: bool = False
    """One of the tensors that an op returns: the op in `reads` makes it."""
    is_random: bool = False
    draws: bool = False
    """Takes numbers from a generator, rather than from a seed that it reads."""
    sums_rows: bool = False
    """A reduction over the last dimension only, which a kernel can do before it goes on."""
    is_heavy: bool = False
    """Takes long to compute for each element, as a logarithm does: Inductor says so on the CPU."""
    is_slow: bool = False
    """Takes long by measurement."""
    is_copied: bool = False
    """An input that backward's convolutions read: Inductor saves a copy of it in the layout that they like."""
    reads_often: bool = False
    """Reads elements several times, as a pooling window does, or in another order than they are summed up in: what it
    reads is computed before, and not for each."""
    moves: bool = False
    """Reads elements elsewhere than it writes them: nothing is written over what it reads."""
    in_place: bool = False
    """Its results lie where what it reads lay: an op that writes, seen as one that returns."""
    module: str = ""
    in_pieces: bool = field(init=False, default=False)
    """Whether it is written piece by piece, as what is concatenated or scattered, or by a kernel of its own: it is in
    memory from then on."""
    concatenates: bool = field(init=False, default=False)
    """Whether its elements lie elsewhere than those that it is made of."""
    work: str = field(init=False, default="")
    """The same for nodes that do the same to as much."""

    def __post_init__(self) -> None:
        place = "backward" if self.phase is Half.BACKWARD else "forward"
        object.__setattr__(self, "work", f"{self.target} {self.elements} {self.size_bytes} {place}")
        object.__setattr__(self, "in_pieces", any(word in self.target for word in _IN_PIECES))
        object.__setattr__(self, "concatenates", _CONCATENATED in self.target)

    @property
    def reads_memory(self) -> bool:
        """Whether what it reads has to be in memory."""
        return self.kind is Kind.ALONE or self.reads_often


@dataclass(frozen=True, slots=True)
class Joint:
    nodes: tuple[JointNode, ...]
    forward_outputs: frozenset[int]
    """Owners of what the caller gets; in memory until the step ends."""
    gradients: frozenset[int]
    """Owners of what backward returns."""
    kept: frozenset[int] = frozenset()
    """Nodes that have to be saved, whatever the budget."""
    readers: tuple[tuple[int, ...], ...] = field(init=False, default=())
    owners: tuple[tuple[int, ...], ...] = field(init=False, default=())
    """For each node, the storages that it reads."""
    parts_bytes: tuple[int, ...] = field(init=False, default=())
    """For each node, the tensors that it returns where these are several."""
    tangents: frozenset[int] = field(init=False, default=frozenset())
    """Gradients that backward is given, which autograd allocates; that of a loss is hardly anything."""
    early: tuple[int, ...] = field(init=False, default=())
    """The nodes in their order, but what backward alone needs as soon as it can run."""

    def __post_init__(self) -> None:
        nodes = self.nodes
        found: list[list[int]] = [[] for _ in nodes]
        for number, node in enumerate(nodes):
            for read in dict.fromkeys(node.reads):
                found[read].append(number)
        owners = (dict.fromkeys(nodes[read].owner for read in node.reads) for node in nodes)
        parts = (sum(nodes[reader].size_bytes for reader in readers if nodes[reader].is_part) for readers in found)
        object.__setattr__(self, "readers", tuple(map(tuple, found)))
        object.__setattr__(self, "owners", tuple(map(tuple, owners)))
        object.__setattr__(self, "parts_bytes", tuple(parts))
        object.__setattr__(self, "tangents", frozenset(_tangents(nodes)))
        object.__setattr__(self, "early", _early(nodes))

    def digest(self) -> str:
        """The same for graphs that are cut and compiled alike."""
        text = "\n".join(f"{node.name} {node.target} {node.size_bytes} {node.reads}" for node in self.nodes)
        return hashlib.sha256(text.encode()).hexdigest()

    def maker(self, number: int) -> int:
        """The op that makes node `number`: itself, unless it is one of several results."""
        node = self.nodes[number]
        return node.reads[0] if node.is_part else number


def _tangents(nodes: tuple[JointNode, ...]) -> Iterator[int]:
    for number, node in enumerate(nodes):
        if node.kind is Kind.INPUT and node.phase is Half.BACKWARD and node.elements > 1:
            yield number


def _early(nodes: tuple[JointNode, ...]) -> tuple[int, ...]:
    places: list[float] = []
    for number, node in enumerate(nodes):
        is_late = node.phase is Half.FREE and node.reads
        places.append(max(places[read] for read in node.reads) + 1e-6 if is_late else float(number))
    return tuple(sorted(range(len(nodes)), key=lambda number: (places[number], number)))


def read_joint(module: GraphModule, num_forward_outputs: int, kept: frozenset[Node] = frozenset()) -> Joint:
    """See the module's docstring."""
    listed = [node for node in module.graph.nodes if node.op != "output"]
    number_of = {node: number for number, node in enumerate(listed)}
    outputs = list(module.graph.output_node().args[0])
    backward = after_tangents(listed)
    forward = ancestors(outputs[:num_forward_outputs])
    mutated = mutated_inputs(module.graph)
    nodes: list[JointNode] = []
    for node in listed:
        phase = Half.BACKWARD if node in backward else Half.FORWARD if node in forward else Half.FREE
        nodes.append(_describe(node, number_of, nodes, phase, mutated))

    def owners(items: list[Any]) -> frozenset[int]:
        return frozenset(nodes[number_of[item]].owner for item in items if isinstance(item, Node))

    return Joint(
        tuple(nodes),
        owners(outputs[:num_forward_outputs]),
        owners(outputs[num_forward_outputs:]),
        frozenset(number_of[node] for node in kept),
    )


def _describe(
    node: Node, number_of: dict[Node, int], made: list[JointNode], phase: Half, mutated: frozenset[Node]
) -> JointNode:
    number = number_of[node]
    value = node.meta.get("val")
    # Numbers are computed by the host, which has them in both halves.
    is_number = isinstance(value, int)
    reads = tuple(number_of[item] for item in node.all_input_nodes) if not is_number else ()
    kind = _kind(node, made, reads)
    owner = made[reads[0]].owner if kind is Kind.VIEW else number
    is_part = node.target is operator.getitem and kind is not Kind.VIEW
    size = 0
    if kind is not Kind.VIEW and isinstance(value, torch.Tensor):
        size = _own_bytes(node, value, kind)
    return JointNode(
        name=node.name,
        target=str(node.target),
        kind=kind,
        phase=phase,
        reads=reads,
        owner=owner,
        size_bytes=size,
        elements=sum(int(tensor.numel()) for tensor in tensors_in(value)),
        recomputable=kind is Kind.VIEW or _is_recomputable(node, mutated),
        is_part=is_part,
        is_random=draws(node) or _name(node) == "inductor_random",
        draws=draws(node),
        sums_rows=kind is Kind.SUM and _sums_rows(node),
        is_heavy=_name(node) in _HEAVY,
        is_slow=_name(node) in _SLOW,
        reads_often=kind is Kind.FUSED and (_reads_windows(node) or _is_padded_sum(node, reads, made, phase)),
        is_copied=node.op == "placeholder" and any(image_of(user) is node for user in node.users),
        moves=_moves(node),
        in_place=is_functionalized(node),
        module=module_of(node),
    )


def _reads_windows(node: Node) -> bool:
    return any(word in _name(node) for word in _WINDOWS) and "offsets_to" not in _name(node)


def _moves(node: Node) -> bool:
    if _name(node) != "clone":
        return _name(node) in _PICKS
    before, after = (item.meta.get("val") for item in (*node.all_input_nodes, node))
    return isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.stride() != after.stride()


def _is_padded_sum(node: Node, reads: tuple[int, ...], made: list[JointNode], phase: Half) -> bool:
    """Whether this makes something larger of what is computed with a reduction: a kernel that sums up rows goes on with
    these rows alone, so what is padded has to be in memory.
    """
    if _name(node) != "constant_pad_nd":
        return False
    seen: set[int] = set()
    waiting = list(reads)
    while waiting:
        number = waiting.pop()
        item = made[number]
        if (
            number in seen
            or item.kind in (Kind.INPUT, Kind.ALONE)
            or (item.phase is Half.BACKWARD) is not (phase is Half.BACKWARD)
        ):
            continue
        if item.kind is Kind.SUM:
            return True
        seen.add(number)
        waiting.extend(item.reads)
    return False


def image_of(node: Node) -> Node | None:
    """What a convolution's gradient reads of the forward; None for other nodes."""
    if node.target is not torch.ops.aten.convolution_backward.default:
        return None
    image = node.args[1]
    return image if isinstance(image, Node) else None


def _own_bytes(node: Node, value: torch.Tensor, kind: Kind) -> int:
    if _name(node) in _FILLED and not _is_written_to(node):
        return 0
    count = int(value.numel())
    if kind is Kind.ALONE and count:
        # Some ops align the rows of what they return.
        strides = zip(value.shape, value.stride(), strict=True)
        count = max(count, 1 + sum((int(size) - 1) * int(stride) for size, stride in strides))
    return count * value.element_size()


def _is_written_to(node: Node) -> bool:
    """Whether this is room that an op is given for its results: it is in memory before the op runs."""
    return _name(node) == "empty" and any(is_functionalized(user) for user in node.users)


def _kind(node: Node, made: list[JointNode], reads: tuple[int, ...]) -> Kind:
    if node.op in ("placeholder", "get_attr") or isinstance(node.meta.get("val"), int):
        return Kind.INPUT
    if node.target is operator.getitem:
        base = made[reads[0]]
        return base.kind
    if _is_view(node):
        return Kind.VIEW
    name = _name(node)
    if runs_alone(node):
        return Kind.ALONE
    return Kind.SUM if name in _SUMS else Kind.FUSED


def _is_view(node: Node) -> bool:
    is_marked = _name(node) in _VIEWS_UNMARKED or returns_views(node.target)
    return is_marked and bool(node.all_input_nodes)


def _is_recomputable(node: Node, mutated: frozenset[Node]) -> bool:
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return True
    return _name(node) not in _SEEDS and may_run_twice(node, mutated)


def _sums_rows(node: Node) -> bool:
    """Whether a reduction's dimensions are the last of what it reads."""
    value = node.all_input_nodes[0].meta.get("val") if node.all_input_nodes else None
    if not isinstance(value, torch.Tensor):
        return False
    dims = node.args[1] if len(node.args) > 1 else None
    listed = [dims] if isinstance(dims, int) else list(dims) if isinstance(dims, (list, tuple)) else []
    rank = value.dim()
    last = {dim % rank for dim in listed if isinstance(dim, int)} if rank else set()
    return bool(last) and last == set(range(rank - len(last), rank)) and len(last) < rank


def _name(node: Node) -> str:
    return op_name(node.target)


def after_tangents(listed: list[Node]) -> set[Node]:
    """Nodes of the backward: incoming gradients, and all that is computed from them."""
    found: set[Node] = set()
    for node in listed:
        if is_tangent(node) or any(item in found for item in node.all_input_nodes):
            found.add(node)
    return found
