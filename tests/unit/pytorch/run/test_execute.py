"""A program runs what its conductor chose, frees what it saved, and refuses what eager refuses."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.support.graphs import captured_from
from tests.support.nets import Loss, Stack, batch

from remat.core.schedule import plain_schedule
from remat.pytorch.graph.capture import Captured
from remat.pytorch.run import execute
from remat.pytorch.run.execute import Chosen, Program, Saved
from remat.pytorch.run.lower import Lowered, lower


class Recorder:
    """A conductor that always chooses the plain schedule and notes what it is told."""

    def __init__(self, captured: Captured) -> None:
        self.lowered = lower(captured, plain_schedule(captured.graph))
        self.told: list[str] = []

    def before_forward(self, inputs: Sequence[Any]) -> Chosen:
        self.told.append("before forward")
        return Chosen(self.lowered)

    def after_forward(self, saved: Saved, outputs: Sequence[Any]) -> None:
        self.told.append("after forward")

    def before_backward(self, saved: Saved, tangents: Sequence[Any]) -> None:
        self.told.append("before backward")

    def after_backward(self, saved: Saved) -> Callable[[Sequence[Any]], None] | None:
        return lambda gradients: self.told.append(f"{len(gradients)} gradients")

    def holds_incoming(self) -> None:
        self.told.append("held")

    def surprised(self) -> tuple[Lowered, frozenset[int]]:
        raise AssertionError("no output was left out")


@pytest.fixture
def ran() -> tuple[Program, Recorder, list[Any], list[torch.Tensor]]:
    torch.manual_seed(0)
    captured = captured_from(Loss(Stack(2)), batch())
    recorder = Recorder(captured)
    program = Program(captured, recorder)
    inputs = [torch.randn(tuple(node.meta["val"].shape)) for node in captured.inputs()]
    outputs = program.forward(list(inputs))
    return program, recorder, outputs, inputs


def tangents(outputs: list[Any]) -> list[Any]:
    return [outputs[-1], *(torch.ones_like(item) for item in outputs[:-1])]


def test_conductor_is_told_of_forward_and_backward_in_order(ran: Any) -> None:
    program, recorder, outputs, _ = ran
    gradients = program.backward(tangents(outputs))
    kinds = [text for text in recorder.told if text != "held"]
    assert kinds == ["before forward", "after forward", "before backward", f"{len(gradients)} gradients"]


def test_second_backward_is_refused_as_in_eager(ran: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program, _, outputs, _ = ran
    # Outside autograd's engine, graphs count as kept.
    monkeypatch.setattr(execute, "keeps_graph", lambda: False)
    program.backward(tangents(outputs))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        program.backward(tangents(outputs))


def test_input_that_was_changed_in_between_is_refused_as_in_eager(ran: Any) -> None:
    program, _, outputs, inputs = ran
    for item in inputs:
        item.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        program.backward(tangents(outputs))


def test_saved_tensors_die_with_the_token(ran: Any) -> None:
    _, _, outputs, inputs = ran
    there = {item.data_ptr() for item in (*inputs, *outputs)}
    saved = [item for item in outputs[-1].remat_saved.tensors if item.data_ptr() not in there]
    watched = [weakref.ref(item) for item in saved]
    del saved
    assert watched
    assert all(reference() is not None for reference in watched)
    outputs.clear()
    assert all(reference() is None for reference in watched)
