"""What Keras keeps to itself: the calls of a functional model in their order, masks, and losses that layers add.

In: models and tensors. Out: the same, as public types; other files of this folder read no private name of Keras.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import keras


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a layer, or of an op of `keras.ops`, in a functional model; tensors are known by their keys."""

    operation: Any
    arguments: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def name(self) -> str:
        return str(self.operation.name)

    def run(self, tensors: Mapping[int, Any], calling: Callable[[Any], Callable[..., Any]]) -> dict[int, Any]:
        """The call's outputs by key; `calling` adds what the model was called with, as `training`."""
        args, kwargs = self.arguments.fill_in(tensors)
        found = keras.tree.flatten(calling(self.operation)(*args, **kwargs))
        return dict(zip(self.outputs, found, strict=True))


@dataclass(frozen=True, slots=True)
class LayerCalls:
    """The calls of a functional model, in the order in which Keras makes them."""

    calls: tuple[LayerCall, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    structure: Any
    """Of the outputs."""


def functional_of(model: Any, data: Any) -> Any:
    """The functional model that runs when `model` is called; None where its layers are called by code of its own.

    A Sequential model that has not seen a batch is built for `data`, as its first call would.
    """
    if isinstance(model, keras.Sequential):
        if not model.built and hasattr(data, "shape"):
            model.build((None, *data.shape[1:]))
        return model._functional
    is_plain = type(model).call is keras.Model.call or type(model).call is _functional_class().call
    return model if isinstance(model, _functional_class()) and is_plain else None


def functional_parts(model: Any) -> list[Any]:
    """The functional models that run when `model` does, as far as they are built; itself among them."""
    parts = [model, *model._flatten_layers(include_self=False)]
    inner = [part._functional if isinstance(part, keras.Sequential) else part for part in parts]
    found = {id(part): part for part in inner if isinstance(part, _functional_class())}
    return [part for part in found.values() if type(part).call is _functional_class().call]


def calls_of(functional: Any) -> LayerCalls:
    known, calls = {id(tensor) for tensor in functional.inputs}, []
    by_depth = functional._nodes_by_depth
    for node in (node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]):
        inputs = tuple(dict.fromkeys(id(tensor) for tensor in node.input_tensors))
        if not node.operation or node.is_input or not known.issuperset(inputs):
            continue
        outputs = tuple(id(tensor) for tensor in node.outputs)
        known.update(outputs)
        calls.append(LayerCall(node.operation, node.arguments, inputs, outputs))
    keys = [tuple(id(tensor) for tensor in tensors) for tensors in (functional.inputs, functional.outputs)]
    return LayerCalls(tuple(calls), keys[0], keys[1], functional._outputs_struct)


def replace_run(functional: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Put `run` in the place of what makes the calls of `functional`; the method that it replaces."""
    plain: Callable[..., Any] = functional._run_through_graph
    functional._run_through_graph = run
    return plain


def restore_run(functional: Any) -> None:
    vars(functional).pop("_run_through_graph", None)


def training_calls(operation: Any) -> Callable[..., Any]:
    """How Keras calls an operation while it trains."""
    from keras.src.models.functional import operation_fn

    return operation_fn(operation, training=True)


def input_specs(functional: Any, data: Any) -> tuple[Any, ...]:
    """Shapes and types of a batch as the model's calls are given it."""
    import tensorflow as tf

    return tuple(tf.TensorSpec.from_tensor(tensor) for tensor in functional._standardize_inputs(data))


def copy_mask(source: Any, target: Any) -> Any:
    """`target` with the mask that goes with `source`."""
    mask = getattr(source, "_keras_mask", None)
    if mask is not None:
        target._keras_mask = mask
    return target


def take_added_losses(model: Any) -> list[str]:
    """Names of the layers that added a loss when they were called last; these losses are forgotten."""
    found = [layer.name for layer in model._flatten_layers() if getattr(layer, "_losses", None)]
    model._clear_losses()
    return found


def _functional_class() -> Any:
    from keras.src.models.functional import Functional

    return Functional
