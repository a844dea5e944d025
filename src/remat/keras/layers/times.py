"""How long the calls of a Keras model take on TensorFlow.

In: calls, their facts and the shapes of the model's inputs. Out: nanoseconds of each forward. Calls that do the same on
the same shapes are timed once. A call that changes something when it runs is not run for this: it is taken to be as
fast, for each byte that it makes, as the others are together.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from remat.keras._compat import LayerCall, LayerCalls, training_calls
from remat.keras.layers.call import CallFacts

ROUNDS = 3


def call_times(calls: LayerCalls, facts: Sequence[CallFacts], specs: Mapping[int, Any], is_jit: bool) -> list[float]:
    """`specs` are those of every tensor, by key."""
    known: dict[Any, float] = {}
    for call, fact in zip(calls.calls, facts, strict=True):
        if not fact.has_state and fact.signature not in known:
            known[fact.signature] = _measured_ns(call, specs, is_jit)
    timed = [(known[fact.signature], fact.made_bytes) for fact in facts if fact.signature in known]
    per_byte = sum(ns for ns, _ in timed) / max(1, sum(size for _, size in timed))
    return [known.get(fact.signature, per_byte * fact.made_bytes) for fact in facts]


def _measured_ns(call: LayerCall, specs: Mapping[int, Any], is_jit: bool) -> float:
    @tf.function(autograph=False, jit_compile=is_jit)
    def forward(*tensors: Any) -> list[Any]:
        return list(call.run(dict(zip(call.inputs, tensors, strict=True)), training_calls).values())

    tensors = [tf.zeros(specs[key].shape, specs[key].dtype) for key in call.inputs]
    forward(*tensors)
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter_ns()
        forward(*tensors)
        tf.test.experimental.sync_devices()
        best = min(best, time.perf_counter_ns() - began)
    return best
