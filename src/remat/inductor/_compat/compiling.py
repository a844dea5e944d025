"""What compiled training takes of torch's compiler: tracing, the cut, both halves, settings; from torch 2.11 on."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

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
from torch._inductor.compile_fx import compile_fx
from torch._inductor.compile_fx import compile_fx_inner as compile_half
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitioner
from torch._inductor.fx_passes import pad_mm
from torch._inductor.graph import GraphLowering
from torch._inductor.pattern_matcher import stable_topological_sort as sort_nodes
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils.checkpoint import CheckpointPolicy as CutPolicy

from remat.pytorch._compat.replaced import replaced

__all__ = [
    "OLDEST",
    "CustomPartitioner",
    "CutPolicy",
    "GlobalState",
    "boxed",
    "compile_fx",
    "compile_half",
    "compile_settings",
    "compiling_at_once",
    "compiling_both_halves",
    "compiling_outside_dynamo",
    "forward_output_count",
    "generates_matmuls",
    "is_cast",
    "is_functionalized",
    "is_supported",
    "lays_out_images",
    "leave_half",
    "lower_to_own_kernel",
    "min_cut",
    "number_from",
    "op_name",
    "open_number",
    "place_to_trace_in",
    "replaying_only",
    "runs_alone",
    "saved_by_min_cut",
    "sort_nodes",
    "take_donated",
    "without_repeats",
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


@contextlib.contextmanager
def replaying_only(draws: Callable[[Node], bool]) -> Iterator[None]:
    """torch's partitioner gives back a generator's state to those ops alone that draw; to others it does for the name.

    It wraps them in an op of its own, of whose inputs and results Inductor does not know how they should be laid out:
    attention's would be copied.
    """

    def make(before: Callable[..., Any]) -> Callable[..., Any]:
        def functionalize(joint: GraphModule, forward: GraphModule, backward: GraphModule, *rest: Any) -> Any:
            again = [node for node in joint.graph.nodes if partitioners.must_recompute(node)]
            for node in again:
                if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and not draws(node):
                    del node.meta["recompute"]
            if not partitioners.has_recomputable_rng_ops(joint):
                return forward, backward
            return before(joint, forward, backward, *rest)

        return functionalize

    with replaced(partitioners, "functionalize_rng_ops", make):
        yield


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
    with compiling_at_once(), functorch_config.patch(cse=False), _pads_decided_once():
        yield


_PADS: dict[str, bool] = {}
"""For each matmul that Inductor may pad, by its own key: whether this process does."""


@contextlib.contextmanager
def _pads_decided_once() -> Iterator[None]:
    """Pad what was padded before. Inductor times both ways and keeps what it finds in a file that all processes write,
    where it gets lost: the same graph would be another one when it is compiled again.
    """

    def known_first(look_up: Callable[[str], bool | None]) -> Callable[[str], bool | None]:
        def is_padded(key: str) -> bool | None:
            if key not in _PADS and (found := look_up(key)) is not None:
                _PADS[key] = found
            return _PADS.get(key)

        return is_padded

    def kept_here(keep: Callable[..., None]) -> Callable[..., None]:
        def keep_pad(key: str, value: bool) -> None:
            _PADS[key] = value
            keep(key, value=value)

        return keep_pad

    with (
        replaced(pad_mm, "get_cached_should_pad", known_first),
        replaced(pad_mm, "set_cached_should_pad", kept_here),
    ):
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
