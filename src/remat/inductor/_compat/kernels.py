"""What compiled training tells Inductor's scheduler: what becomes one kernel, where, and what it writes over."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._inductor.codegen.simd import SIMDKernel
from torch._inductor.codegen.wrapper import AllocateLine, can_match_buffer_size
from torch._inductor.dependencies import MemoryDep
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import (
    CommBufferLayout,
    ComputedBuffer,
    ExternKernel,
    FixedLayout,
    FlexibleLayout,
    TensorBox,
    get_stride_order,
)
from torch._inductor.scheduler import BaseSchedulerNode, NopKernelSchedulerNode, Scheduler
from torch._inductor.virtualized import V
from torch._ops import OpOverload
from torch.fx import Node
from torch.utils._ordered_set import OrderedSet

from remat.pytorch._compat.replaced import replaced

COMPUTED_HERE = "remat_computed_here"
"""In the `meta` of a node whose result is to be in memory before what follows it in the graph runs."""


@contextlib.contextmanager
def computing_where_told() -> Iterator[None]:
    """Inductor computes what is marked where it stands, and not when it is first read."""
    before = GraphLowering.run_node

    def run_node(self: Any, node: Node) -> object:
        result = before(self, node)
        if node.meta.get(COMPUTED_HERE) and isinstance(result, TensorBox):
            order = order_for_attention(node)
            if order is not None:
                return ExternKernel.require_stride_order(result, order)
            result.realize()
            _align_rows(result.data)
        return result

    with replaced(GraphLowering, "run_node", lambda _: run_node):
        yield


def _align_rows(storage: Any) -> None:
    """Rows of matrices of awkward sizes, as logits of 50265 words, are as far apart as Inductor has them.

    It decides that when a matmul reads them; a view of what is in memory before that would have it decided otherwise.
    """
    buffer = getattr(storage, "data", None)
    if not isinstance(buffer, ComputedBuffer):
        return
    layout = buffer.layout
    if not isinstance(layout, FlexibleLayout) or len(layout.size) > _MOST_DIMENSIONS:
        return
    if layout.should_pad_strides() and layout.stride != layout._pad_strides(layout.stride, layout.size, layout.dtype):
        buffer.freeze_layout()


_MOST_DIMENSIONS = 3
"""Of what is no image, whose layout is up to convolutions."""


def order_for_attention(node: Node) -> tuple[int, ...] | None:
    """How attention that reads this has it laid out, 0 for the innermost dimension; None where none reads it.

    Inductor asks for that only of what is not yet in memory, and takes what is as it is: attention returns what it
    computes as it was given its queries, so that heads and rows would have to be turned round after it.
    """
    value = node.meta.get("val")
    roles = {
        (user.target.__name__, argument.name)
        for user in node.users
        if isinstance(user.target, OpOverload) and "scaled_dot_product" in user.target.__name__
        for argument, given in zip(user.target._schema.arguments, user.args, strict=False)
        if given is node
    }
    # A bias has its rows aligned when attention reads it, which has to be left to Inductor.
    if not roles or any(role in _BIASES for _, role in roles):
        return None
    if not isinstance(value, torch.Tensor) or value.dim() != len(_ROWS_BEFORE_HEADS):
        return None
    if any("efficient_attention_backward" in name and role in _OUTPUTS for name, role in roles):
        # It takes nothing else.
        return _ROWS_BEFORE_HEADS
    strides = [stride for stride in value.stride() if isinstance(stride, int)]
    order = tuple(get_stride_order(strides)) if len(strides) == value.dim() else ()
    return order if order and order[-1] == 0 else None


_BIASES, _OUTPUTS = ("attn_bias", "attn_mask"), ("out", "grad_out", "grad_out_")
_ROWS_BEFORE_HEADS = (3, 1, 2, 0)
"""Of batches, heads, rows and features: as the matmuls before and after attention have them."""


NUMBER = "remat_number"
"""In the `meta` of a node that is compiled: its number in the joint graph."""


class PlannedKernel(NamedTuple):
    """A kernel that Inductor is about to write."""

    nodes: frozenset[int]
    """What it computes, by number."""
    made_bytes: int
    """Of its results."""
    waits_for: tuple[PlannedKernel, ...] = ()
    """All that has to run before, where somebody asks for it."""


@contextlib.contextmanager
def joining_kernels_where(may_be_one: Callable[[PlannedKernel, PlannedKernel], bool]) -> Iterator[None]:
    """Inductor makes one of two kernels only where it may."""
    before = Scheduler.can_fuse
    seen: dict[str, PlannedKernel] = {}

    def ancestors(scheduler: Any, node: Any) -> Iterator[PlannedKernel]:
        for name in node.ancestors:
            if name not in seen and name in scheduler.name_to_node:
                seen[name] = _kernel(scheduler.name_to_node[name])
            if name in seen:
                yield seen[name]

    def can_fuse(self: Any, one: Any, other: Any, *args: Any, **options: Any) -> bool:
        if not before(self, one, other, *args, **options):
            return False
        kernels = [_kernel(node)._replace(waits_for=tuple(ancestors(self, node))) for node in (one, other)]
        return may_be_one(*kernels)

    with replaced(Scheduler, "can_fuse", lambda _: can_fuse):
        yield


def _kernel(node: Any) -> PlannedKernel:
    numbers: set[int] = set()
    size = 0
    for item in node.get_nodes():
        numbers |= _numbers_of(item.node)
        size += sum(_bytes_of(buffer) for buffer in item.get_outputs())
    return PlannedKernel(frozenset(numbers), size)


def _numbers_of(node: Any) -> set[int]:
    """Of what an item of the code is made for; where torch has lost sight of that, of all that it computes."""
    made_for = node.get_origin_node() if node is not None else None
    if made_for is not None and made_for.meta.get(NUMBER) is not None:
        return {made_for.meta[NUMBER]}
    found = (origin.meta.get(NUMBER) for origin in node.get_origins()) if node is not None else ()
    return {number for number in found if number is not None}


def _bytes_of(buffer: Any) -> int:
    """Of a result of a kernel; none where its size is open or it is none of its own."""
    layout = getattr(buffer.node, "layout", None)
    dtype = getattr(layout, "dtype", None)
    if layout is None or dtype is None:
        return 0
    return dtype.itemsize * math.prod(
        int(size) if isinstance(size, int) or size.is_Integer else 0 for size in layout.size
    )


@contextlib.contextmanager
def writing_over_what_ends() -> Iterator[None]:
    """A kernel writes over what it is the last to read, rather than over what it makes on the way.

    Inductor splits long chains into several results that one kernel computes. Each may be written over one that it
    reads itself, the first that is found. Where that is one of the kernel's own, which nobody sees, memory is taken for
    it; where only the first of a chain reads what ends, and is in another type than the last, nothing is written over.
    """
    before = BaseSchedulerNode.decide_inplace_update

    def decide(self: Any) -> None:
        reads, kernel = self.read_writes.reads, self.scheduler.get_fused_node(self)
        own = {buffer.get_name() for item in kernel.get_nodes() for buffer in item.get_outputs()}
        self.read_writes.reads = OrderedSet(sorted(reads, key=lambda read: read.name in own))
        try:
            before(self)
        finally:
            self.read_writes.reads = reads
        _write_over_what_the_kernel_ends(self, kernel, own)

    with replaced(BaseSchedulerNode, "decide_inplace_update", lambda _: decide):
        yield


def _write_over_what_the_kernel_ends(node: Any, kernel: Any, own: set[str]) -> None:
    """Write a result that is seen over what only nodes before this one read, all in this pointwise kernel."""
    writing = V.kernel
    if not isinstance(writing, SIMDKernel) or kernel.is_reduction() or len(own) < 2 or len(node.get_outputs()) != 1:
        return
    (buffer,), (written, *more) = node.get_outputs(), node.read_writes.writes
    if more or not isinstance(written, MemoryDep) or written.mode is not None or not _is_own(buffer):
        return
    is_seen = any(user.get_name() not in kernel.get_operation_names() for user in buffer.users)
    taken = writing.inplace_update_buffers
    if not is_seen or buffer.get_name() in taken:
        return
    earlier = [item for item in kernel.get_nodes() if item.get_name() in node.ancestors]
    for name in dict.fromkeys(read.name for item in earlier for read in item.read_writes.reads):
        ended = node.scheduler.name_to_donated_buffer.get(name) or node.scheduler.name_to_buf.get(name)
        if ended is None or name in own or name in writing.args.inplace_buffers or _is_on_another_stream(name, node):
            continue
        if _ends_in(ended, earlier, node, written) and can_match_buffer_size(ended.node, buffer.node):
            writing.args.make_inplace(name, buffer.get_name())
            writing.mutations.update((name, buffer.get_name()))
            taken[buffer.get_name()] = name
            return


def _is_on_another_stream(name: str, node: Any) -> bool:
    # Not on torch 2.11, where all runs on one.
    has_hazard = getattr(node.scheduler, "has_cross_stream_hazard", None)
    return has_hazard is not None and has_hazard(name, node)


def _is_own(buffer: Any) -> bool:
    """Whether this is memory that was taken for it."""
    if buffer.node is None or buffer.get_name() in V.graph.removed_buffers:
        return False
    layout = buffer.node.get_output_spec()
    is_plain = isinstance(layout, FixedLayout) and not isinstance(layout, CommBufferLayout)
    return is_plain and not buffer.node.get_inputs_that_alias_output() and not buffer.node.get_mutation_names()


def _ends_in(ended: Any, earlier: Sequence[Any], node: Any, written: Any) -> bool:
    """Whether all that still read a buffer are in this list, and read it where `node` will have written."""
    names = {item.get_name() for item in earlier}
    done = node.scheduler.completed_operations | V.graph.removed_operations
    users = [user.node for user in ended.users if user.node.get_name() not in done]
    if not _is_own(ended) or isinstance(ended.defining_op, NopKernelSchedulerNode):
        return False
    if not V.graph.wrapper_code.can_reuse(ended, node) or not all(user.get_name() in names for user in users):
        return False
    reads = [dep for user in users for dep in user.read_writes.reads if dep.name == ended.get_name()]
    return bool(reads) and all(
        isinstance(dep, MemoryDep) and (dep.index, dep.size) == (written.index, written.size) for dep in reads
    )


FAR_FROM_PEAK = 0.9
"""Inductor's own estimate of memory is not exact."""


@contextlib.contextmanager
def holding_freed_buffers_up_to(
    size_bytes: int, may_hold: Callable[[PlannedKernel, PlannedKernel, int], bool] | None = None
) -> Iterator[None]:
    """Where Inductor reuses buffers, hold freed ones for later tensors of their size only if they are small, or where
    there is room for so many bytes from one kernel to another, which `may_hold` knows; without it, where memory is far
    from its peak meanwhile.

    What the very next kernel takes is not held at all.
    """

    def should_reuse(line: Any, freed: Any, size: int) -> bool:
        if size <= size_bytes or freed.scheduler_node_index + 1 == line.scheduler_node_index:
            return True
        if may_hold is not None:
            nodes = V.graph.scheduler.nodes
            last, following = (_kernel(nodes[item.scheduler_node_index]) for item in (freed, line))
            return may_hold(last, following, size)
        estimate = getattr(line.wrapper, "estimate_peak", None)
        if estimate is None:
            return False
        held: int = estimate.peak_between(freed, line) + size
        return held <= FAR_FROM_PEAK * estimate.overall_peak_memory

    before = AllocateLine.should_reuse_buffer
    AllocateLine.should_reuse_buffer = should_reuse
    try:
        yield
    finally:
        AllocateLine.should_reuse_buffer = before
