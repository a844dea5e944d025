"""Lowered graphs behind AOTAutograd's autograd function.

AOTAutograd asks a partitioner for a forward and a backward graph and wraps them so that aliases, mutated inputs and
autocast behave as in eager. `partition` hands it two shells: forward returns the outputs and one empty tensor, the
token, and backward takes that token. What backward really needs travels on the token, so the schedule can change
between steps without tracing the model again, and saved tensors die one by one during backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import Graph, GraphModule, Node

from remat.pytorch._compat import FakeTensor, keeps_graph, leave_absent_gradients_absent
from remat.pytorch.capture import Captured
from remat.pytorch.lower import Lowered
from remat.pytorch.rng import RngState


class Saved:
    """What one forward call leaves for its backward call."""

    __slots__ = ("__weakref__", "absent", "inputs", "lowered", "rng", "tensors", "versions")

    def __init__(self, chosen: Chosen, rng: RngState | None, inputs: list[Any]) -> None:
        self.lowered = chosen.lowered
        self.absent = chosen.absent
        self.rng = rng
        self.inputs = inputs
        self.tensors: tuple[Any, ...] = ()
        self.versions: tuple[tuple[weakref.ref[torch.Tensor], int], ...] = ()

    def fill(self, tensors: tuple[Any, ...], watched: Iterable[Any]) -> None:
        """Forward has run: note what it saved and the versions of inputs that backward reads."""
        self.tensors = tensors
        kept = {id(tensor) for tensor in tensors}
        self.versions = tuple(
            (weakref.ref(tensor), tensor._version)
            for tensor in watched
            if id(tensor) in kept and isinstance(tensor, torch.Tensor) and not tensor.is_inference()
        )

    def check_versions(self) -> None:
        """Refuse as eager does when an input that backward reads was changed in between."""
        for reference, version in self.versions:
            tensor = reference()
            if tensor is not None and tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{tuple(tensor.shape)} is at version {tensor._version}; expected version {version} instead."
                )


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a forward call runs, and which outputs it takes to receive no gradient."""

    lowered: Lowered
    absent: frozenset[int] = frozenset()


class Conductor(Protocol):
    """Told when a program's forward or backward starts; chooses what forward runs."""

    def before_forward(self, inputs: Sequence[Any]) -> Chosen: ...

    def after_forward(self, saved: Saved, outputs: Sequence[Any]) -> None: ...

    def before_backward(self, saved: Saved, tangents: Sequence[Any]) -> None: ...

    def after_backward(self, saved: Saved) -> Callable[[Sequence[Any]], None] | None:
        """Whom to tell the gradients, if anybody."""

    def surprised(self) -> tuple[Lowered, frozenset[int]]:
        """An output that was taken to receive no gradient has one: what to run now, and what it leaves out."""


class Program:
    """The pair of functions that AOTAutograd calls for one captured graph; `conductor` says what they run."""

    def __init__(self, captured: Captured, conductor: Conductor) -> None:
        self._conductor = conductor
        self._tangents = [node.meta["val"] for node in captured.tangents()]
        self._device_type = captured.device.type
        # What the step itself updates after forward may change; everything else that backward reads must not.
        self._watched = [place for place, node in enumerate(captured.inputs()) if node not in captured.mutated]

    def forward(self, boxed: list[Any]) -> list[Any]:
        leave_absent_gradients_absent()
        chosen = self._conductor.before_forward(boxed)
        # Enough to run forward again, should a gradient arrive that was not expected.
        guessed = bool(chosen.absent)
        saved = Saved(chosen, RngState(self._device_type) if guessed else None, list(boxed) if guessed else [])
        watched = [boxed[place] for place in self._watched]
        outputs, tensors = chosen.lowered.forward(boxed)
        saved.fill(tensors, watched)
        del watched, tensors
        token = torch.empty(0)
        token.remat_saved = saved
        self._conductor.after_forward(saved, outputs)
        return [*outputs, token]

    def backward(self, boxed: list[Any]) -> tuple[Any, ...]:
        token = boxed.pop(0)
        saved: Saved | None = token.remat_saved
        if saved is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: its saved tensors were freed by the first "
                "backward; pass retain_graph=True there."
            )
        saved.check_versions()
        self._conductor.before_backward(saved, boxed)
        if not keeps_graph():
            token.remat_saved = None
        run, tensors = self._backward_of(saved, boxed)
        done = self._conductor.after_backward(saved)
        arguments = [*tensors, *self._tangents_or_zeros(saved, boxed)]
        boxed.clear()
        del saved, token, tensors
        gradients = run(arguments)
        if done is not None:
            done(gradients)
        return gradients

    def _backward_of(self, saved: Saved, tangents: Sequence[Any]) -> tuple[Callable[[list[Any]], Any], tuple[Any, ...]]:
        absent = frozenset(number for number, tangent in enumerate(tangents) if tangent is None)
        if saved.absent <= absent:
            run = saved.lowered.backward_keeping if keeps_graph() else saved.lowered.backward
            return run, saved.tensors
        # Right before fast: forward runs again from its inputs and generator state, for the outputs that count.
        lowered, saved.absent = self._conductor.surprised()
        assert saved.rng is not None
        _, tensors = saved.rng.replay(lowered.forward, list(saved.inputs))
        return lowered.backward, tensors

    def _tangents_or_zeros(self, saved: Saved, tangents: Sequence[Any]) -> Iterator[Any]:
        for number, (tangent, fake) in enumerate(zip(tangents, self._tangents, strict=True)):
            if tangent is None and number not in saved.absent:
                yield torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)
            else:
                yield tangent


def boxed_call(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark `function` as one that takes its arguments in a list and may empty it."""

    def call(boxed: list[Any]) -> Any:
        return function(boxed)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def shells(captured: Captured) -> tuple[GraphModule, GraphModule]:
    """The two graphs AOTAutograd sees: right inputs, outputs and metadata, nothing to compute."""
    primals = captured.inputs()
    forward = Graph()
    for node in primals:
        _declare(forward, node)
    outputs = [_stand_in(forward, item) for item in captured.forward_outputs]
    token = forward.call_function(torch.empty, (0,))
    forward.output((*outputs, token))
    backward = Graph()
    # Only backward's token has a fake value: AOTAutograd would call a described forward token a donated buffer and
    # then refuse `retain_graph=True`.
    backward.placeholder(token.name).meta["val"] = _fake_token(primals)
    for node in captured.tangents():
        _declare(backward, node)
    backward.output(tuple(_stand_in(backward, item) for item in captured.backward_outputs))
    return GraphModule({}, forward, "RematForwardShell"), GraphModule({}, backward, "RematBackwardShell")


def _fake_token(primals: list[Node]) -> torch.Tensor:
    fakes = (node.meta["val"] for node in primals)
    mode = next(fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor))
    with mode:
        return torch.empty(0)


def _declare(graph: Graph, node: Node) -> None:
    graph.placeholder(node.name).meta.update(node.meta)


def _stand_in(graph: Graph, item: Any) -> Any:
    if not isinstance(item, Node):
        return item
    node = graph.call_function(torch.empty, (0,))
    node.meta.update(item.meta)
    return node
