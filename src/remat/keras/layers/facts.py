"""What each call of a Keras model does on TensorFlow, read from one trace of a step; nothing runs.

In: a model's calls and the shapes of its inputs. Out: a `CallFacts` for each call: what its backward reads of what it
made, what it writes that outlives it, and how large everything is. A tensor whose shape TensorFlow does not know counts
nothing.
"""

from __future__ import annotations

from collections.abc import Container, Sequence, Set
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from remat.keras._compat import LayerCalls, training_calls
from remat.keras.layers.call import CallFacts
from remat.keras.layers.replay import LayerReplay

READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp", "VarHandleOp", "Placeholder"}
"""Ops that TensorFlow calls stateful and that change nothing."""
SAME_BYTES = {"Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient", "Snapshot"}
"""Ops whose result is their first input, seen in another way."""
SHAPES_ONLY = {"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike", "BroadcastGradientArgs"}


@dataclass(slots=True)
class _Ranges:
    """Where in the traced graph a call's forward and backward stand."""

    forward: range
    backward: range = range(0)
    has_gradient: bool = False
    gradients: frozenset[str] = frozenset()
    """Names of what its backward gives to inputs and weights."""


def facts_of(calls: LayerCalls, specs: Sequence[Any]) -> tuple[CallFacts, ...]:
    """Trace forward and backward for inputs of these shapes."""
    found: list[CallFacts] = []

    def step(*tensors: Any) -> list[Any]:
        graph = tf.compat.v1.get_default_graph()
        replay = LayerReplay(calls, training_calls, is_jit=False)
        replay.begin(tensors)
        ranges: list[_Ranges] = []
        recorded: dict[int, Any] = {}
        for number in range(len(calls.calls)):
            ranges.append(_Ranges(_span(graph, lambda number=number: replay.compute(number))))
            recorded[number] = replay.recorded[number]
        outputs = replay.outputs()
        replay.give([tf.ones_like(tensor) for tensor in outputs])
        for number in reversed(range(len(calls.calls))):
            row = ranges[number]
            row.backward = _span(graph, lambda row=row, number=number: _differentiate(replay, row, number))
        found.extend(_read(graph, calls, replay, recorded, ranges))
        return outputs

    tf.function(step, autograph=False).get_concrete_function(*specs)
    return tuple(found)


def _differentiate(replay: LayerReplay, row: _Ranges, number: int) -> None:
    found = replay.differentiate(number)
    row.has_gradient = found is not None
    row.gradients = frozenset(tensor.name for tensor in found or () if tensor is not None and tf.is_tensor(tensor))


def _span(graph: Any, action: Any) -> range:
    before = len(graph.get_operations())
    action()
    return range(before, len(graph.get_operations()))


def _read(
    graph: Any, calls: LayerCalls, replay: LayerReplay, recorded: dict[int, Any], ranges: list[_Ranges]
) -> list[CallFacts]:
    ops = graph.get_operations()
    places = {op.name: place for place, op in enumerate(ops)}
    keys = {tensor.name: key for key, tensor in replay.values.items()}
    rows = []
    for number, (call, row) in enumerate(zip(calls.calls, ranges, strict=True)):
        forward, backward = ([ops[place] for place in span] for span in (row.forward, row.backward))
        kept = _kept(backward, places, row.forward, keys)
        inside = {name: size for name, size in kept.items() if name not in keys}
        weights = recorded[number].tape.watched_variables() if row.has_gradient else ()
        rows.append(
            CallFacts(
                name=call.name,
                makes=call.outputs,
                reads=call.inputs,
                sizes=tuple(tensor_bytes(replay.values[key]) for key in call.outputs),
                specs=tuple(tf.TensorSpec.from_tensor(replay.values[key]) for key in call.outputs),
                kept_bytes=sum(inside.values()),
                kept_keys=frozenset(keys[name] for name in kept if name in keys),
                weight_bytes=sum(tensor_bytes(weight) for weight in weights),
                forward_workspace=_inner_peak(forward, kept.keys() | keys.keys()),
                backward_workspace=_inner_peak(backward, row.gradients),
                has_state=any(op.op_def.is_stateful and op.type not in READS for op in forward),
                has_gradient=row.has_gradient,
                signature=tuple((op.type, *(str(out.shape) + out.dtype.name for out in op.outputs)) for op in forward),
            )
        )
    return rows


def _kept(backward: Sequence[Any], places: dict[str, int], forward: range, keys: dict[str, int]) -> dict[str, int]:
    """Names and bytes of what the ops of a backward read of its forward, of its inputs and of its outputs."""
    found: dict[str, int] = {}
    for tensor in (tensor for op in backward if op.type not in SHAPES_ONLY for tensor in op.inputs):
        root = _root(tensor, keys)
        is_inside = places[root.op.name] in forward and root.op.type not in ("ReadVariableOp", "Const")
        if root.name in keys or is_inside:
            found[root.name] = tensor_bytes(root)
    return found


def _inner_peak(ops: Sequence[Any], counted: Set[str]) -> int:
    """The most that is in memory while the ops run one by one, of what they make that is not `counted` elsewhere."""
    roots = {out.name: _root(out, counted).name for op in ops for out in op.outputs}
    last = {roots.get(tensor.name): place for place, op in enumerate(ops) for tensor in op.inputs}
    live, peak, ends = 0, 0, dict[int, int]()
    for place, op in enumerate(ops):
        for out in op.outputs:
            if roots[out.name] == out.name not in counted and op.type not in READS | {"Const"}:
                size, end = tensor_bytes(out), last.get(out.name, place)
                live, ends[end] = live + size, ends.get(end, 0) + size
        peak = max(peak, live)
        live -= ends.pop(place, 0)
    return peak


def _root(tensor: Any, known: Container[str]) -> Any:
    """Whose bytes a tensor shows."""
    while tensor.name not in known and tensor.op.type in SAME_BYTES:
        tensor = tensor.op.inputs[0]
    return tensor


def tensor_bytes(tensor: Any) -> int:
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    return int(tensor.shape.num_elements() or 0) * int(tensor.dtype.size)
