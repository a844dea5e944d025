"""What every op of a captured graph costs on the device in use.

In: a `Captured`. Out: `Costs`. Each distinct op (target, shapes, dtypes, strides, arguments) runs once to warm up
while its allocations are watched, then a few times against the clock; the median counts. So 24 identical layers cost
as much as one, and nothing at all the second time. Where an op cannot be run the roofline answers, for collectives the
link between ranks.
"""

from __future__ import annotations

import functools
import operator
import platform
import re
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from remat.core.cache_file import cache_folder
from remat.core.problem import Costs
from remat.pytorch._compat.fakes import ASK_GRAD_MODE, FAKED_WRONGLY, call_in_grad_mode
from remat.pytorch._compat.memory import profiler_is_running
from remat.pytorch._compat.modes import HigherOrderOperator, without_autocast, without_modes
from remat.pytorch._compat.symbols import as_called
from remat.pytorch._compat.tensors import schema_of, storage_address
from remat.pytorch.costs.allocations import extra_bytes_of_calls, take_matmul_workspaces
from remat.pytorch.costs.collective_costs import collective_ns
from remat.pytorch.costs.cost_cache import CostCache, OpCost
from remat.pytorch.costs.queued_clock import QueuedClock
from remat.pytorch.costs.roofline import roofline_ns
from remat.pytorch.costs.turns import measuring_alone
from remat.pytorch.device import generator_indices, storage_bytes
from remat.pytorch.graph.capture import Captured
from remat.pytorch.graph.nodes import is_collective, tensors_in
from remat.pytorch.graph.real_results import ASSERTS, REFUSALS
from remat.pytorch.kernel_choice import kernel_choice_kept, onednn_is_used

Clock = Callable[[Callable[[], Any]], float]
"""Nanoseconds that one call takes."""
Progress = Callable[[int, int, str], None]
"""Called with (ops measured, ops to measure, the op at hand)."""

MOST_RUNS = 7
SECONDS_PER_OP = 0.03
_TELL_THEIR_BACKWARD = (
    *("scaled_dot_product", "native_layer_norm", "batch_norm", "native_group_norm"),
    *("remat.max_pool2d", "aten._embedding_bag"),
)
_STREAM = "two large tensors added"
STREAM_BYTES = 2**26
LONG_NS = 0.3e9
"""An op that takes this long on CPU is not run a second time: warming up hardly changes it."""


def profile(captured: Captured, progress: Progress | None = None, *, again: bool = False) -> Costs:
    """Measure what is not in the cache yet, or all of it `again`, and add it there."""
    keys = ["" if node is None or hasattr(node.target, "costs_nothing") else op_key(node) for node in captured.op_nodes]
    nodes = {key: node for key, node in zip(keys, captured.op_nodes, strict=True) if key and node is not None}
    shared = {key: node for key, node in nodes.items() if is_collective(node)}
    own = {key: node for key, node in nodes.items() if key not in shared}
    known = costs_of(own, captured.device, progress, again=again)
    known |= {key: OpCost(collective_ns(node, captured.device), 0) for key, node in shared.items()}
    costs = [known[key] if key else OpCost(0.0, 0) for key in keys]
    return Costs(
        time_ns=tuple(cost.time_ns for cost in costs),
        workspace_bytes=tuple(cost.workspace_bytes for cost in costs),
        size_bytes=captured.size_bytes,
    )


def costs_of(
    nodes: Mapping[str, Node], device: torch.device, progress: Progress | None = None, *, again: bool = False
) -> dict[str, OpCost]:
    """What is known of ops on `device`, by `op_key`; those of `nodes` that are missing, or all of them `again`, are
    measured and added.
    """
    cache = CostCache(device_key(device), cache_folder() / "costs")
    known = cache.load()
    missing = {key: node for key, node in nodes.items() if again or key not in known}
    if missing and device.type == "cpu" and profiler_is_running():
        return {**known, **_estimate_all(missing, device)}
    if missing:
        measured = _measure_all(missing, device, progress)
        cache.add(measured)
        known.update(measured)
    return known


def _estimate_all(missing: Mapping[str, Node], device: torch.device) -> dict[str, OpCost]:
    """What is taken where nobody may measure: there is one profiler for all, and it is not ours to stop."""
    warnings.warn(
        "A profiler of yours is running, so what ops cost is only estimated; let a step or two run before you profile.",
        stacklevel=2,
    )
    return {key: OpCost(roofline_ns(node, device), _output_bytes(node, device)) for key, node in missing.items()}


def stream_bytes_per_ns(device: torch.device) -> float:
    """Bytes for each nanosecond that a kernel reads and writes where it computes next to nothing."""
    cache = CostCache(device_key(device), cache_folder() / "costs")
    known = cache.load().get(_STREAM)
    if known is None:
        with measuring_alone(device), torch.no_grad(), without_modes():
            left, right = (torch.zeros(STREAM_BYTES // 4, dtype=torch.float32, device=device) for _ in range(2))
            clock = clock_of(device)
            torch.add(left, right, out=right)
            known = OpCost(usual_ns(lambda: torch.add(left, right, out=right), clock), 0)
        cache.add({_STREAM: known})
    return 3 * STREAM_BYTES / known.time_ns


def device_key(device: torch.device) -> str:
    """Measurements are valid for one device, torch version, number of threads and choice of kernels."""
    if device.type == "cpu":
        hardware = f"cpu {platform.machine()} {torch.get_num_threads()} threads"
        hardware += "" if onednn_is_used() else " without oneDNN"
    else:
        hardware = f"{device.type} {torch.cuda.get_device_name(device)}"
    return f"{hardware} torch {torch.__version__.split('+')[0]}"


def op_key(node: Node) -> str:
    """The same for ops that cost the same."""

    return call_key(node.target, map_arg(node.args, _value_of), map_arg(node.kwargs, _value_of))


def _value_of(node: Node) -> Any:
    """What a node stands for; a size that is left open is what it was in the call that was traced."""
    return as_called(node.meta.get("val"))


def call_key(target: Any, args: Any, kwargs: Any) -> str:
    """Target, and shape, stride and dtype or literal of each argument."""
    positional = ", ".join(_describe(arg) for arg in args)
    named = ", ".join(f"{name}={_describe(arg)}" for name, arg in sorted(kwargs.items()))
    return f"{target}({positional}; {named})"


def without_layout(key: str) -> str:
    """A `call_key` with only its target and its tensors' dtypes and shapes."""
    tensors = re.findall(r"(\w+\[[\d, ]*\])\[[\d, ]*\]", key)
    return f"{key.partition('(')[0]}({', '.join(tensors)})"


def _describe(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return f"{str(argument.dtype)[6:]}{list(argument.shape)}{list(argument.stride())}{argument.device.type}"
    if isinstance(argument, (list, tuple)):
        return "[" + ", ".join(_describe(item) for item in argument) + "]"
    return repr(argument)


def _measure_all(missing: dict[str, Node], device: torch.device, progress: Progress | None) -> dict[str, OpCost]:
    measured: dict[str, OpCost] = {}
    clock = clock_of(device)
    # Otherwise it would count as part of the first op that multiplies.
    take_matmul_workspaces(device)
    with (
        measuring_alone(device),
        torch.no_grad(),
        without_modes(),
        torch.random.fork_rng(devices=generator_indices(device)),
    ):
        for number, (key, node) in enumerate(missing.items()):
            if progress is not None:
                progress(number, len(missing), str(node.target))
            with without_autocast(), kernel_choice_kept():
                measured[key] = _measure(node, device, clock)
    if progress is not None:
        progress(len(missing), len(missing), "")
    return measured


def _measure(node: Node, device: torch.device, clock: Clock) -> OpCost:
    if is_collective(node) or ASSERTS in str(node.target):
        # The other ranks may know its cost already and would not answer; what is asserted of made-up data is false,
        # which on CUDA ends the process.
        return OpCost(roofline_ns(node, device), 0)
    reason, found = "", list[OpCost]()
    for fill in _fills(node, device):
        try:
            found.append(_measure_call(real_call(node, fill), _output_bytes(node, device), device, clock))
        except REFUSALS as error:
            reason = reason or str(error).split("\n")[0]
        if found and not _reads_integers(node):
            break
    if not found:
        return _estimate_unmeasured(node, device, reason)
    # What an op needs that goes by indices can depend on them.
    return OpCost(found[0].time_ns, max(cost.workspace_bytes for cost in found))


def _estimate_unmeasured(node: Node, device: torch.device, reason: str) -> OpCost:
    warnings.warn(
        f"{node.target} could not be measured ({reason}); its time is estimated, and what it needs for itself is taken "
        "to be as much as it returns.",
        stacklevel=2,
    )
    return OpCost(roofline_ns(node, device), _output_bytes(node, device))


def _measure_call(call: Callable[[], Any], output_bytes: int, device: torch.device, clock: Clock) -> OpCost:
    taken: list[float] = []
    # Around the call alone: watching allocations takes time of its own.
    workspace = extra_bytes_of_calls(lambda: taken.append(_host_clock(call)), device) - output_bytes
    is_long = device.type == "cpu" and taken[0] > LONG_NS
    return OpCost(taken[0] if is_long else usual_ns(call, clock), max(0, workspace))


def _output_bytes(node: Node, device: torch.device) -> int:
    storages = {storage_address(tensor): as_called(tensor) for tensor in tensors_in(node.meta.get("val"))}
    return sum(storage_bytes(tensor, device) for tensor in storages.values())


def clock_of(device: torch.device) -> Clock:
    return QueuedClock(device) if device.type == "cuda" else _host_clock


def usual_ns(call: Callable[[], Any], clock: Clock) -> float:
    """Of several runs. Whatever else a GPU or its host does makes a run longer, never shorter; a CPU may run faster
    for a while than it can for long.
    """
    times: list[float] = []
    while len(times) < MOST_RUNS and (len(times) < 1 or sum(times) < SECONDS_PER_OP * 1e9):
        times.append(clock(call))
    return min(times) if isinstance(clock, QueuedClock) else statistics.median(times)


def _host_clock(call: Callable[[], Any]) -> float:
    start = time.perf_counter_ns()
    call()
    return float(time.perf_counter_ns() - start)


class Fill(Enum):
    """What made-up arguments hold; some ops only take probabilities, or offsets that grow from 0."""

    ANY = "normal numbers, random indices"
    SHARES = "numbers from 0 to 1, random indices"
    RISING = "numbers from 0 to 1, indices that grow"
    ZERO = "numbers from 0 to 1, indices that are 0"


def _fills(node: Node, device: torch.device) -> Sequence[Fill]:
    """What to try, one after the other.

    A number that is no probability, or offsets in disorder, end a CUDA kernel and with it the process, where a CPU
    kernel only refuses them.
    """
    if device.type != "cuda":
        return tuple(Fill)
    return (Fill.RISING, Fill.ZERO) if _reads_integers(node) else (Fill.SHARES,)


def _reads_integers(node: Node) -> bool:
    read = (tensor for item in node.all_input_nodes for tensor in tensors_in(item.meta.get("val")))
    return any(tensor.dtype in (torch.int32, torch.int64) for tensor in read)


def real_call(node: Node, fill: Fill = Fill.ANY) -> Callable[[], Any]:
    """The op with real arguments of the right shapes."""
    bound = _index_bound(node)

    def real(item: Node) -> Any:
        if item.target is operator.getitem and makes_blocks_for_its_backward(item.args[0].target):
            # Only the forward can write the opaque block that this op reads; made-up bytes would crash it.
            return made_by_forward(item.args[0])[item.args[1]]
        if item.op == "get_attr" and "val" not in item.meta:
            return operator.attrgetter(str(item.target))(item.graph.owning_module)
        value = _value_of(item)
        return _real_tensor(value, bound, fill) if isinstance(value, torch.Tensor) else value

    @functools.cache
    def made_by_forward(forward: Node) -> Any:
        return real_call(forward, fill)()

    return _bound_call(node.target, map_arg(node.args, real), dict(map_arg(node.kwargs, real)))


def _bound_call(target: Any, arguments: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[], Any]:
    # An op of ops adds what it is given to tuples of its own.
    lists = (list,) if isinstance(target, HigherOrderOperator) else (list, tuple)
    args = [list(arg) if isinstance(arg, lists) else arg for arg in arguments]
    if "grouped_mm" in str(target) or (args and isinstance(args[0], str) and "grouped_mm" in args[0]):
        _use_even_groups(args[1] if isinstance(args[0], str) else args)
    if target in ASK_GRAD_MODE:
        return lambda: call_in_grad_mode(target, *args, **kwargs)
    return lambda: target(*args, **kwargs)


def makes_blocks_for_its_backward(target: Any) -> bool:
    """Fused layers hand their backward generator states and blocks whose contents and device only they know.

    A norm's statistics are fp32 where its input is half, which fake tensors do not know. Offsets of a pool point into
    its image.
    """
    return target in FAKED_WRONGLY or any(part in str(target) for part in _TELL_THEIR_BACKWARD)


def _use_even_groups(args: list[Any]) -> None:
    """Offsets of groups must grow up to the number of rows."""
    if len(args) > 2 and isinstance(args[2], torch.Tensor):
        args[2] = torch.linspace(0, args[0].shape[0], args[2].shape[0] + 1)[1:].to(args[2])


def _index_bound(node: Node) -> int:
    """Integers below this are valid indices: into what is indexed where that is known, and else into any dimension."""
    if getattr(node.target, "namespace", "") != "aten":
        return 1
    indexed = _indexed_sizes(node)
    if indexed:
        return max(1, min(indexed))
    shapes: list[int] = []
    for item in node.all_input_nodes:
        for tensor in tensors_in(_value_of(item)):
            shapes.extend(int(size) for size in tensor.shape)
    shapes.extend(arg for arg in node.args if isinstance(arg, int) and not isinstance(arg, bool))
    return min((size for size in shapes if size > 1), default=1)


def _indexed_sizes(node: Node) -> list[int]:
    """Of the dimensions that an op like `x[i, j]` or `x.gather(dim, i)` takes indices into; a wrong one ends CUDA."""
    schema = schema_of(node.target)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    given = dict(zip(names, node.args, strict=False))
    value = _value_of(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
    if not isinstance(value, torch.Tensor) or not value.dim():
        return []
    shape = [int(size) for size in value.shape]
    if isinstance(given.get("indices"), (list, tuple)):
        return [size for size, index in zip(shape, given["indices"], strict=False) if index is not None]
    return [shape[given["dim"]]] if isinstance(given.get("index"), Node) and isinstance(given.get("dim"), int) else []


def _real_tensor(fake: torch.Tensor, bound: int, fill: Fill) -> torch.Tensor:
    # A dimension of stride 0 is one row seen many times; it is allocated once, as in the model.
    shape = [1 if stride == 0 else int(size) for size, stride in zip(fake.shape, fake.stride(), strict=True)]
    real = torch.empty_strided(shape, list(fake.stride()), dtype=fake.dtype, device=fake.device)
    if fill is not Fill.ANY and fake.dtype.is_floating_point:
        real.uniform_()
    elif fill in (Fill.RISING, Fill.ZERO) and fake.dtype is not torch.bool:
        share = bound if fill is Fill.RISING else 0
        count = max(1, real.numel())
        real.copy_((torch.arange(count, device=fake.device) * share // count)[: real.numel()].view(real.shape))
    elif fake.dtype.is_floating_point or fake.dtype.is_complex:
        real.normal_()
    elif fake.dtype is torch.bool:
        real.bernoulli_(0.5)
    elif real.numel():
        real.random_(0, bound)
    return real.expand(fake.shape)
