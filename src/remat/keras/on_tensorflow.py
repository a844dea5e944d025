"""Keras on TensorFlow: calls of layers whose outputs, and what they hold for backward, are kept or made again.

TensorFlow frees a tensor when nobody reads it any more, and tells no exact peak on CPUs; so the plan is made from the
calls of layers and the shapes of tensors, and its peak is an estimate. It is made when the first batch is there,
because only then its size is known, and anew for a larger one. What cannot be planned trains as it is, with a warning.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from remat.core.budget import Budget, BudgetUnit, format_bytes
from remat.core.results.plan import Plan
from remat.errors import CaptureError, InfeasibleBudget
from remat.keras import _compat
from remat.keras.layers.planning import LayerModel, LayerPlan, SolverWishes, allowed_bytes, model_layers, plan_layers
from remat.keras.layers.replay import LayerReplay

MOST_NAMES = 4


@dataclass(slots=True)
class PlannedLayers:
    model: Any
    budget: Budget
    wishes: SolverWishes
    planned: LayerPlan | None = None
    functional: Any = None
    elements: int = 0
    """Of the largest batch that was planned for."""
    is_training: bool = False
    is_left: bool = False
    """Whether the model trains as it is, because it cannot be planned."""
    batches: Any = None
    """Where the last batch came from: what comes from there is as large."""
    inner: Any = None
    """Keras's own training function."""

    @staticmethod
    def attach(model: Any, budget: Budget, wishes: SolverWishes) -> PlannedLayers:
        allowed_bytes(budget, 0)
        state = PlannedLayers(model, budget, wishes)
        plain_step, plain_make = model.train_step, model.make_train_function

        def train_step(data: Any) -> Any:
            state.is_training = True
            try:
                return plain_step(data)
            finally:
                state.is_training = False

        def make_train_function(force: bool = False) -> Any:
            if model.train_function is None or force:
                plain_make(force=True)
                state.inner, model.train_function = model.train_function, state.train
            return model.train_function

        model.train_step, model.make_train_function = train_step, make_train_function
        return state

    def train(self, batches: Any) -> Any:
        """What `fit` calls for each step. The first batch of each epoch is looked at before it is trained on."""
        if self.is_left or batches is self.batches:
            return self.inner(batches)
        first = next(batches)
        self.batches = batches
        self._prepare(first)
        return self.inner(iter([first]))

    def detach(self) -> None:
        for name in ("train_step", "make_train_function"):
            vars(self.model).pop(name, None)
        if self.functional is not None:
            _compat.restore_run(self.functional)
        self.model.train_function = None

    @property
    def plan(self) -> Plan:
        """The plan in use; made in the first step."""
        if self.planned is None:
            raise CaptureError("There is no plan yet: it is made in the first step.")
        return self.planned.plan

    @property
    def budget_bytes(self) -> int | None:
        return None if self.planned is None else self.planned.plan.budget_bytes

    @property
    def peak_bytes(self) -> int | None:
        return None if self.planned is None else self.planned.plan.predicted_peak

    def _prepare(self, data: Any) -> None:
        """Plan for a batch that is larger than those before."""
        try:
            inputs = keras.utils.unpack_x_y_sample_weight(data)[0]
            functional = _plannable(self.model, inputs)
            specs = _compat.input_specs(functional, inputs)
            elements = sum(math.prod(spec.shape) for spec in specs)
            if elements <= self.elements:
                return
            model = model_layers(functional, specs, bool(self.model.jit_compile))
        # Tracing calls the layers, whose code may raise anything; Keras will say it again where it matters.
        except Exception as error:
            self._leave(error)
            return
        self.planned = self._planned(model)
        self._run_from_now_on(functional, self.elements > 0)
        self.elements = elements

    def _planned(self, model: LayerModel) -> LayerPlan:
        try:
            planned = plan_layers(model, self.budget, self.wishes)
        except InfeasibleBudget as error:
            if not self.elements:
                raise
            smallest = format_bytes(error.min_budget)
            warnings.warn(
                f"A larger batch needs an estimated {smallest}, beyond its budget; training goes on with that.",
                stacklevel=2,
            )
            planned = plan_layers(model, Budget(error.min_budget, BudgetUnit.BYTES), self.wishes)
        if planned.stateful and not self.elements:
            names, rest = planned.stateful[:MOST_NAMES], len(planned.stateful) - MOST_NAMES
            listed = ", ".join(names) + (f" and {rest} more" if rest > 0 else "")
            warnings.warn(
                f"Layers that change their state when they run are kept, not made again: {listed}.", stacklevel=2
            )
        return planned

    def _leave(self, error: Exception) -> None:
        self.is_left = True
        if self.functional is not None:
            # A smaller batch was planned for; its plan serves.
            return
        reason = str(error) if isinstance(error, CaptureError) else f"{type(error).__name__}: {error}"
        warnings.warn(f"The model cannot be planned ({reason:.200}); it trains as it is.", stacklevel=2)

    def _run_from_now_on(self, functional: Any, was_traced: bool) -> None:
        if self.functional is None:
            self.functional = functional
            plain = _compat.replace_run(functional, lambda *args, **kwargs: self._run(plain, *args, **kwargs))
        if was_traced:
            # What TensorFlow made of the step before holds the plan before.
            self.model.make_train_function(force=True)

    def _run(self, plain: Callable[..., Any], inputs: Any, operation_fn: Any = None, call_fn: Any = None) -> Any:
        """In the place of Keras's run through a model's calls."""
        if self.planned is None or not self.is_training or operation_fn is None or call_fn is not None:
            options = {} if operation_fn is None else {"operation_fn": operation_fn}
            return plain(inputs, **options, call_fn=call_fn)
        return run_planned(self.planned, keras.tree.flatten(inputs), operation_fn, bool(self.model.jit_compile))


def run_planned(planned: LayerPlan, inputs: Sequence[Any], calling: Callable[..., Any], is_jit: bool) -> Any:
    """The model's outputs, with a backward that follows the plan."""
    replay = LayerReplay(planned.calls, calling, is_jit)

    @tf.custom_gradient
    def run(*tensors: Any) -> Any:
        replay.begin(tensors)
        for number in planned.forward:
            replay.compute(number)

        def backward(*gradients: Any, variables: Sequence[Any] = ()) -> Any:
            replay.give(gradients)
            for is_backward, number in planned.backward:
                (replay.differentiate if is_backward else replay.compute)(number)
            found = replay.input_gradients()
            return (found, replay.weight_gradients(variables)) if variables else found

        return replay.outputs(), backward

    results = run(*inputs)
    found = [_compat.copy_mask(made, result) for made, result in zip(replay.outputs(), results, strict=True)]
    return keras.tree.pack_sequence_as(planned.calls.structure, found)


def _plannable(model: Any, inputs: Any) -> Any:
    """The functional model inside; refused where there is none, or where its steps are not traced on one device."""
    functional = _compat.functional_of(model, inputs)
    if functional is None:
        raise CaptureError("its layers are called by code of its own; a functional or Sequential model is needed")
    if model.run_eagerly:
        raise CaptureError("with run_eagerly=True TensorFlow holds everything until backward")
    if model.distribute_strategy.num_replicas_in_sync > 1:
        raise CaptureError("several replicas train together")
    return functional
