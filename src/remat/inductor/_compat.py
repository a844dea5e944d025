"""Everything private of torch that compiled training leans on, in one place; for torch 2.11 and later."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch._dynamo.source import ConstantSource
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import min_cut_rematerialization_partition as min_cut
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen.simd import SIMDKernel
from torch._inductor.codegen.wrapper import AllocateLine, can_match_buffer_size
from torch._inductor.compile_fx import compile_fx
from torch._inductor.compile_fx import compile_fx_inner as compile_half
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitioner
from torch._inductor.dependencies import MemoryDep
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import CommBufferLayout, FixedLayout, TensorBox
from torch._inductor.pattern_matcher import stable_topological_sort as sort_nodes
from torch._inductor.scheduler import BaseSchedulerNode, NopKernelSchedulerNode, Scheduler
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._ordered_set import OrderedSet
from torch.utils.checkpoint import CheckpointPolicy as CutPolicy

from remat.pytorch._compat.replaced import replaced

__all__ = [
    "COMPUTED_HERE",
    "NUMBER",
    "OLDEST",
    "CustomPartitioner",
    "CutPolicy",
    "GlobalState",
    "PlannedKernel",
    "boxed",
    "compile_fx",
    "compile_half",
    "compile_settings",
    "compiling_at_once",
    "compiling_both_halves",
    "compiling_outside_dynamo",
    "computing_where_told",
    "forward_output_count",
    "generates_matmuls",
    "holding_freed_buffers_up_to",
    "is_cast",
    "is_functionalized",
    "is_supported",
    "joining_kernels_where",
    "lays_out_images",
    "leave_half",
    "lower_to_own_kernel",
    "min_cut",
    "number_from",
    "op_name",
    "open_number",
    "place_to_trace_in",
    "runs_alone",
    "saved_by_min_cut",
    "sort_nodes",
    "take_donated",
    "without_repeats",
    "writing_over_what_ends",
]

_TEMPLATES = frozenset(
    (
        *("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "linear", "matmul"),
        *("_scaled_mm", "_int_mm", "_grouped_mm"),
    )
)


GlobalState = torch._C._dynamo.guards.GlobalStateGuard
"""How torch is set when one is made; `check()` tells whether it still is."""

OLDEST = (2, 11)
"""The first torch whose partitioner hook this was written for."""


def is_supported() -> bool:
    """Whether compiled code can be planned with this torch."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= OLDEST


def op_name(op: Any) -> str:
    """`add` for `aten.add.Tensor`; empty for what is no op of torch."""
    name = getattr(op, "_opname", None)
    return str(name or getattr(getattr(op, "overloadpacket", None), "_qualified_op_name", "").rpartition("::")[2])


def runs_alone(node: Node) -> bool:
    """Whether Inductor runs this op as a kernel of its own: a template, a library's kernel or eager's."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    name = op_name(target)
    return name in _TEMPLATES or "attention" in name or target in _fallbacks() or target not in _lowerings()


def is_cast(node: Node) -> bool:
    """Whether this makes the same tensor in another type."""
    return node.target is torch.ops.prims.convert_element_type.default and isinstance(node.args[0], Node)


def generates_matmuls(asked: Mapping[str, Any]) -> bool:
    """Whether Inductor may write matmuls itself, under its settings and what is `asked` of it."""
    return any(asked.get(name, getattr(inductor_config, name)) for name in ("max_autotune", "max_autotune_gemm"))


def lower_to_own_kernel(op: Any) -> None:
    """Let what `op` gets be computed by a kernel of its own, in the place of `op`, which does nothing more."""
    from torch._inductor.lowering import register_lowering

    @register_lowering(op, type_promotion_kind=None)
    def lowered(source: Any) -> Any:
        source.realize()
        V.graph.no_fuse_buffer_names.add(source.get_name())
        return source


def is_functionalized(node: Node) -> bool:
    """Whether this is an op that writes to its arguments, as a function that returns new ones."""
    higher = torch.ops.higher_order
    return node.target in (higher.auto_functionalized, higher.auto_functionalized_v2)


@functools.cache
def _lowered() -> tuple[Any, Any]:
    from torch._inductor import lowering

    return lowering.fallbacks, lowering.lowerings


def _fallbacks() -> Any:
    return _lowered()[0]


def _lowerings() -> Any:
    return _lowered()[1]


def without_repeats(module: GraphModule) -> None:
    """Drop nodes that nobody reads and keep one of those that compute the same, as torch's partitioner does first."""
    module.graph.eliminate_dead_code()
    module.graph = fx_graph_cse(module.graph)
    module.recompile()


class _SavedValues(Exception):
    """What torch's partitioner has chosen to save, on its way out of it."""

    def __init__(self, joint: GraphModule, nodes: Sequence[Node]) -> None:
        super().__init__()
        self.joint, self.nodes = joint, nodes


def saved_by_min_cut(
    module: GraphModule, inputs: Sequence[object], *, num_fwd_outputs: int, **options: Any
) -> list[Node]:
    """What torch's partitioner would save of a joint graph, for which it makes no halves; it writes into the graph.

    Nodes are those of a copy of the graph, with the `meta` of the original ones.
    """

    def leave(joint: GraphModule, *saved: Sequence[Node], saved_sym_nodes: Sequence[Node] = (), **_: Any) -> Any:
        raise _SavedValues(joint, [*itertools.chain(*saved), *saved_sym_nodes])

    try:
        with replaced(partitioners, "_extract_fwd_bwd_modules", lambda _: leave):
            min_cut(module, inputs, num_fwd_outputs=num_fwd_outputs, **options)
    except _SavedValues as found:
        results: Any = found.joint.graph.output_node().args[0]
        needed = _read_from(found.nodes, [node for node in results[num_fwd_outputs:] if isinstance(node, Node)])
        return [node for node in found.nodes if node in needed]
    raise AssertionError("torch's partitioner makes its halves in one place")


def _read_from(saved: Sequence[Node], results: Sequence[Node]) -> set[Node]:
    """The nodes that have to be there, or run again, for `results`: what is saved needs nothing itself."""
    found, waiting, is_saved = set[Node](), list(results), set(saved)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            if node not in is_saved:
                waiting.extend(node.all_input_nodes)
    return found


def place_to_trace_in() -> FakeTensorMode:
    """As Dynamo has one while it compiles: without, Inductor does not use its cache."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


@contextlib.contextmanager
def compiling_outside_dynamo(mode: FakeTensorMode) -> Iterator[None]:
    """In such a place."""
    with torch._guards.tracing(torch._guards.TracingContext(mode)):
        yield


def open_number(mode: FakeTensorMode, name: str, size: int) -> torch.SymInt:
    """A number that is left open where it is traced in that place, and was `size` there."""
    env, source = mode.shape_env, ConstantSource(name)
    assert env is not None, "a place to trace in has room for sizes"
    symbol = env.create_symbol(size, source, DimDynamic.DYNAMIC, constraint_dim=None)
    number: torch.SymInt = env.create_symintnode(symbol, hint=size, source=source)
    return number


def number_from(expression: Any, mode: FakeTensorMode, size: int) -> torch.SymInt:
    """What an expression of symbols of that place stands for."""
    assert mode.shape_env is not None, "a place to trace in has room for sizes"
    number: torch.SymInt = mode.shape_env.create_symintnode(expression, hint=size)
    return number


@contextlib.contextmanager
def compiling_at_once() -> Iterator[None]:
    """Compile the backward together with the forward, not when it is first called: what cannot be compiled is then
    known before anything has run. AOTAutograd's own cache would keep halves as Inductor made them.
    """
    with functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False):
        yield


def boxed(function: Any) -> Any:
    """Tell AOTAutograd that `function` takes a list of arguments, which it may empty."""
    taking_a_list = functools.partial(function)
    taking_a_list._boxed_call = True  # type: ignore[attr-defined]
    return taking_a_list


def forward_output_count() -> int:
    """How many results of the forward that was just compiled are the caller's; the others are saved for backward."""
    meta = _metadata()
    return int(meta.num_forward_returns) if meta is not None else 0


def take_donated() -> list[int]:
    """Which arguments the backward that was just compiled writes into; AOTAutograd believes that there are none."""
    meta = _metadata()
    listed = meta.bw_donated_idxs if meta is not None else None
    found = list(listed or ())
    if listed:
        listed.clear()
    return found


def _metadata() -> Any:
    context = torch._guards.TracingContext.try_get()
    return context.fw_metadata if context is not None else None


@contextlib.contextmanager
def compiling_both_halves() -> Iterator[None]:
    """Compile the backward together with the forward, and always ask our partitioner.

    AOTAutograd's own cache is looked up before the graph is cut, when no choice is known yet; Inductor's cache of the
    two halves stays in use. Nodes that compute the same are merged before the cut is chosen, not after: some of those
    that come later are meant to run twice.
    """
    with compiling_at_once(), functorch_config.patch(cse=False):
        yield


def leave_half(module: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """In place of `compile_half`, where nobody will run what is made: hardly any time goes into it."""
    return make_boxed_func(module.forward)


def lays_out_images(graph: Graph) -> bool:
    """Whether Inductor would lay out the images of this graph as convolutions like them, channels last."""
    return bool(GraphLowering.decide_layout_opt(SimpleNamespace(graph=graph), is_inference=False))


def loaded_code(key: str) -> Mapping[str, Any]:
    """The globals of a wrapper that Inductor has loaded, its kernels among them; empty where it is not there."""
    for module in reversed(PyCodeCache.modules):
        if getattr(module, "key", None) == key:
            return vars(module)
    return {}


def run_kernel(kernel: Any, args: Sequence[Any]) -> None:
    """As a wrapper runs a kernel that was generated for a GPU."""
    kernel.run(*args, stream=torch.cuda.current_stream().cuda_stream)


def modes() -> Mapping[str, Mapping[str, Any]]:
    """Of torch.compile, each with the settings of Inductor that it stands for."""
    return list_mode_options()


def compile_settings(settings: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """Inductor's settings, for a while."""
    patched: contextlib.AbstractContextManager[Any] = inductor_config.patch(settings)
    return patched


COMPUTED_HERE = "remat_computed_here"
"""In the `meta` of a node whose result is to be in memory before what follows it in the graph runs."""


@contextlib.contextmanager
def computing_where_told() -> Iterator[None]:
    """Inductor computes what is marked where it stands, and not when it is first read."""
    before = GraphLowering.run_node

    def run_node(self: Any, node: Node) -> object:
        result = before(self, node)
        if node.meta.get(COMPUTED_HERE) and isinstance(result, TensorBox):
            result.realize()
        return result

    with replaced(GraphLowering, "run_node", lambda _: run_node):
        yield


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
        if item.node is not None:
            found = (origin.meta.get(NUMBER) for origin in item.node.get_origins())
            numbers.update(number for number in found if number is not None)
        size += sum(_bytes_of(buffer) for buffer in item.get_outputs())
    return PlannedKernel(frozenset(numbers), size)


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
    outputs = node.get_outputs()
    if not isinstance(writing, SIMDKernel) or kernel.is_reduction() or len(outputs) != 1 or not len(own) > 1:
        return
    (buffer,), (written, *more) = outputs, node.read_writes.writes
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
