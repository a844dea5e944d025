"""Functional models that let go of what a layer made once its last reader has run.

In: a model. Out: while the context lasts, another way through the calls of its graphs. Keras holds what every layer
made until its forward is over; what code still holds can neither be freed nor given up and made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras

from remat.keras import _compat
from remat.keras._compat import LayerCalls


@contextmanager
def letting_go(model: Any) -> Iterator[None]:
    """Also in models inside the model; one that has not been built yet is left alone."""
    parts = _compat.functional_parts(model)
    for functional in parts:
        walk = _Walk(_compat.calls_of(functional))
        walk.plain = _compat.replace_run(functional, walk)
    try:
        yield
    finally:
        for functional in parts:
            _compat.restore_run(functional)


@dataclass(slots=True)
class _Walk:
    calls: LayerCalls
    plain: Callable[..., Any] | None = None

    def __call__(self, inputs: Any, operation_fn: Callable[[Any], Any] = lambda op: op, call_fn: Any = None) -> Any:
        if call_fn is not None and self.plain is not None:
            # Shapes are being followed, not tensors.
            return self.plain(inputs, operation_fn, call_fn)
        tensors = dict(zip(self.calls.inputs, keras.tree.flatten(inputs), strict=True))
        for call, dying in zip(self.calls.calls, last_reads(self.calls), strict=True):
            tensors.update(call.run(tensors, operation_fn))
            for key in dying:
                del tensors[key]
        return keras.tree.pack_sequence_as(self.calls.structure, [tensors[key] for key in self.calls.outputs])


def last_reads(calls: LayerCalls) -> list[list[int]]:
    """For each call, what nobody reads after it, its own outputs included."""
    seen = set(calls.outputs)
    found: list[list[int]] = []
    for call in reversed(calls.calls):
        dying = [key for key in dict.fromkeys((*call.inputs, *call.outputs)) if key not in seen]
        seen.update(dying)
        found.append(dying)
    return found[::-1]
