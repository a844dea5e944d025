"""The calls of a model in the order of a schedule, forward and backward, on TensorFlow.

In: tensors of one batch. Out: the model's outputs, and gradients. Every call is recorded on a tape of its own, so that
its backward reads what its latest run left and nothing of runs before; what no backward reads, TensorFlow frees. A call
that is made again waits for what came before it: otherwise TensorFlow would run it as soon as its inputs are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from remat.keras._compat import LayerCalls, copy_mask


@dataclass(frozen=True, slots=True)
class _Recorded:
    tape: Any
    inputs: dict[int, Any]
    outputs: dict[int, Any]


@dataclass(slots=True)
class LayerReplay:
    calls: LayerCalls
    calling: Callable[[Any], Callable[..., Any]]
    is_jit: bool
    """Whether XLA compiles this: it knows no order but that of data."""
    values: dict[int, Any] = field(default_factory=dict)
    held_by: dict[int, Any] = field(default_factory=dict)
    recorded: dict[int, _Recorded] = field(default_factory=dict)
    partial: dict[int, list[Any]] = field(default_factory=dict)
    """Gradients that consumers of a tensor have given."""
    weights: dict[Any, list[Any]] = field(default_factory=dict)
    last: Any = None
    """What the last step made that is no repetition: calls that are made again wait for it."""

    def begin(self, tensors: Sequence[Any]) -> None:
        self.values.update(zip(self.calls.inputs, tensors, strict=True))

    def outputs(self) -> list[Any]:
        return [self.values[key] for key in self.calls.outputs]

    def compute(self, number: int) -> None:
        call = self.calls.calls[number]
        is_again = call.outputs[0] in self.values
        waits_for = self.last if is_again else None
        inputs = {key: self._held(key, waits_for) for key in call.inputs}
        with tf.GradientTape() as tape:
            tape.watch([tensor for tensor in inputs.values() if _is_float(tensor)])
            outputs = call.run(inputs, self.calling)
        self.values.update(outputs)
        self.held_by.update(dict.fromkeys(outputs, waits_for))
        self.recorded[number] = _Recorded(tape, inputs, outputs)
        if not is_again:
            self.last = next(iter(outputs.values()))

    def give(self, gradients: Sequence[Any]) -> None:
        """Gradients of the model's outputs."""
        for key, gradient in zip(self.calls.outputs, gradients, strict=True):
            if gradient is not None and _is_float(self.values[key]):
                self.partial.setdefault(key, []).append(gradient)
                self.last = gradient

    def differentiate(self, number: int) -> list[Any] | None:
        """Hand the gradients of a call's outputs on to its inputs and weights; None where there are none."""
        recorded = self.recorded.pop(number)
        if not any(self.partial.get(key) for key in recorded.outputs):
            return None
        outputs = {key: tensor for key, tensor in recorded.outputs.items() if _is_float(tensor)}
        inputs = {key: tensor for key, tensor in recorded.inputs.items() if _is_float(tensor)}
        weights = recorded.tape.watched_variables()
        given = [self._gathered(key, tensor) for key, tensor in outputs.items()]
        found = recorded.tape.gradient(list(outputs.values()), [*inputs.values(), *weights], output_gradients=given)
        for key, gradient in zip(inputs, found, strict=False):
            if gradient is not None:
                self.partial.setdefault(key, []).append(tf.convert_to_tensor(gradient))
                self.last = self.partial[key][-1]
        for weight, gradient in zip(weights, found[len(inputs) :], strict=True):
            if gradient is not None:
                self.weights.setdefault(weight.ref(), []).append(gradient)
        return list(found)

    def input_gradients(self) -> list[Any]:
        return [_sum(self.partial.get(key, [])) for key in self.calls.inputs]

    def weight_gradients(self, variables: Sequence[Any]) -> list[Any]:
        return [_sum(self.weights.get(variable.ref(), [])) for variable in variables]

    def _gathered(self, key: int, tensor: Any) -> Any:
        found = _sum(self.partial.pop(key, []))
        return tf.zeros_like(tensor) if found is None else found

    def _held(self, key: int, waits_for: Any) -> Any:
        """The tensor, after the step before; one that was made since the last wait has waited already."""
        tensor = self.values[key]
        if waits_for is None or self.held_by.get(key) is waits_for:
            return tensor
        return copy_mask(tensor, (_equal_after if self.is_jit else _same_after)(tensor, waits_for))


def _same_after(tensor: Any, waits_for: Any) -> Any:
    """The same buffer, in a shape that is known once `waits_for` is there.

    A control dependency would say so too, but TensorFlow's folding of constants moves factors of products past those,
    and gradients of a layer norm after a product came out wrong; an identity of both is taken apart.
    """
    same = tf.reshape(tensor, tf.shape(tensor) + tf.cast(_never(waits_for), tf.int32))
    same.set_shape(tensor.shape)
    return same


def _equal_after(tensor: Any, waits_for: Any) -> Any:
    """The same bits for XLA, which knows shapes ahead."""
    return tf.where(_never(waits_for), tf.zeros_like(tensor), tensor)


def _never(waits_for: Any) -> Any:
    """False, by way of data that no compiler foresees: nothing is both no number and infinite."""
    one = tf.reshape(waits_for, [-1])[:1][0]
    return tf.math.logical_and(tf.math.is_nan(one), tf.math.is_inf(one))


def _is_float(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating)


def _sum(gradients: Sequence[Any]) -> Any:
    if len(gradients) < 2:
        return gradients[0] if gradients else None
    return tf.add_n([tf.convert_to_tensor(gradient) for gradient in gradients])
