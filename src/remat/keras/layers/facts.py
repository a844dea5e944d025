"""What each call of a Keras model does on TensorFlow, read from one trace of a step; nothing runs.

In: a model's calls and the shapes of its inputs. Out: a `CallFacts` for each call: what its backward reads of what it
made, what it writes that outlives it, and how large everything is. A tensor whose shape TensorFlow does not know counts
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from remat.keras._compat import LayerCalls, training_calls
from remat.keras.layers.replay import Replay

READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp", "VarHandleOp", "Placeholder"}
"""Ops that TensorFlow calls stateful and that change nothing."""
SAME_BYTES = {"Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient", "Snapshot"}
"""Ops whose result is their first input, seen in another way."""
SHAPES_ONLY = {"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike", "BroadcastGradientArgs"}


@dataclass(frozen=True, slots=True)
class CallFacts:
    name: str
    makes: tuple[int, ...]
    """Keys of its outputs."""
    reads: tuple[int, ...]
    """Keys of its inputs."""
    specs: tuple[Any, ...]
    """Of its outputs."""
    kept_bytes: int
    """What its backward reads of what is neither an input nor an output of a call."""
    kept_keys: frozenset[int]
    """What its backward reads of inputs and outputs of calls."""
    weight_bytes: int
    """Of the gradients of its weights."""
    forward_workspace: int
    backward_workspace: int
    has_state: bool
    """Whether a second run would change something a second time."""
    has_gradient: bool
    signature: tuple[Any, ...]
    """Equal for calls that do the same on the same shapes."""

    @property
    def made_bytes(self) -> int:
        return sum(map(tensor_bytes, self.specs))


@dataclass(slots=True)
class _Ranges:
    """Where in the traced graph a call's forward and backward stand."""

    forward: range
    backward: range = range(0)
    has_gradient: bool = False


def facts_of(calls: LayerCalls, specs: Sequence[Any]) -> tuple[CallFacts, ...]:
    """Trace forward and backward for inputs of these shapes."""
    found: list[CallFacts] = []

    def step(*tensors: Any) -> list[Any]:
        graph = tf.compat.v1.get_default_graph()
        replay = Replay(calls, training_calls, is_jit=False)
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


def _differentiate(replay: Replay, row: _Ranges, number: int) -> None:
    row.has_gradient = replay.differentiate(number)


def _span(graph: Any, action: Any) -> range:
    before = len(graph.get_operations())
    action()
    return range(before, len(graph.get_operations()))


def _read(
    graph: Any, calls: LayerCalls, replay: Replay, recorded: dict[int, Any], ranges: list[_Ranges]
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
                specs=tuple(tf.TensorSpec.from_tensor(replay.values[key]) for key in call.outputs),
                kept_bytes=sum(inside.values()),
                kept_keys=frozenset(keys[name] for name in kept if name in keys),
                weight_bytes=sum(tensor_bytes(weight) for weight in weights),
                forward_workspace=_largest(forward, kept.keys() | keys.keys()),
                backward_workspace=_largest(backward, ()),
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
        root = tensor
        while root.name not in keys and root.op.type in SAME_BYTES:
            root = root.op.inputs[0]
        is_inside = places[root.op.name] in forward and root.op.type not in ("ReadVariableOp", "Const")
        if root.name in keys or is_inside:
            found[root.name] = tensor_bytes(root)
    return found


def _largest(ops: Sequence[Any], but: Any) -> int:
    sizes = [
        tensor_bytes(out)
        for op in ops
        if op.type not in SAME_BYTES | READS | {"Const"}
        for out in op.outputs
        if out.name not in but
    ]
    return max(sizes, default=0)


def tensor_bytes(tensor: Any) -> int:
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    return int(tensor.shape.num_elements() or 0) * int(tensor.dtype.size)
