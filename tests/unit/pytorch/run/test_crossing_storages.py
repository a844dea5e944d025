"""Storages that go in and out of graphs are followed by when they die."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.support.graphs import captured_from
from tests.support.nets import Loss, Stack, batch

from remat.pytorch._compat.tensors import storage_address
from remat.pytorch.graph.capture import Captured
from remat.pytorch.run.watching.crossing_storages import Observer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def captured() -> Captured:
    return captured_from(Loss(Stack(2)), batch())


def outputs_of(captured: Captured) -> list[torch.Tensor]:
    return [torch.zeros(tuple(node.meta["val"].shape)) for node in captured.forward_outputs]


def test_output_that_the_caller_drops_is_held_to_that_gap(captured: Captured) -> None:
    observer = Observer(CPU, known=[])
    observer.take_inputs(0, [])
    outputs = outputs_of(captured)
    observer.note_outputs(0, captured, outputs)
    (source,) = observer.held(1)
    assert observer.held(1)[source] == 1, "it lives, so it is held to the end"
    outputs.clear()
    assert observer.held(1)[source] == 0


def test_input_that_was_given_was_there_before_the_step() -> None:
    given, made = torch.zeros(8), torch.zeros(16)
    observer = Observer(CPU, known=[], given={storage_address(given): 32})
    observer.take_inputs(0, [given, made, 3])
    assert (observer.input_bytes, observer.made_bytes) == (32, 64)
    assert observer.given_bytes == 0, "it is an input of a graph, and counted as such"
    assert observer.counts(storage_address(made))


def test_what_outlives_the_step_is_not_followed() -> None:
    parameter = torch.zeros(8)
    observer = Observer(CPU, known=[storage_address(parameter)])
    observer.take_inputs(0, [parameter])
    assert observer.input_bytes == observer.made_bytes == 0


def test_gradient_that_another_graph_returned_is_known_by_its_value(captured: Captured) -> None:
    observer = Observer(CPU, known=[])
    outputs = outputs_of(captured)
    observer.note_outputs(0, captured, outputs)
    ((number, call, value),) = observer.sources([None, outputs[0], torch.zeros(3)])
    assert (number, call) == (1, 0)
    assert value == captured.base[captured.forward_outputs[0]]


def test_gaps_are_counted_as_long_as_programs_run_in_order(captured: Captured) -> None:
    observer = Observer(CPU, known=[])
    for call, backward in ((0, False), (1, False), (0, True)):
        nodes = captured.backward_outputs if backward else captured.forward_outputs
        observer.note_outputs(call, captured, [None] * len(nodes), backward=backward)
    assert observer.ordered_gaps(2) == 2
