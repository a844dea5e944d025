"""Lowered graphs behind AOTAutograd's autograd function.

AOTAutograd asks a partitioner for a forward and a backward graph and wraps them so that aliases, mutated inputs and
autocast behave as in eager. `partition` hands it two shells: forward returns the outputs and one empty tensor, the
token, and backward takes that token. What backward really needs travels on the token, so the schedule can change
between steps without tracing the model again, and saved tensors die one by one during backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from remat.pytorch._compat import FakeTensor, keeps_graph
from remat.pytorch.capture import Captured
from remat.pytorch.lower import Lowered


class Saved:
    """What one forward call leaves for its backward call."""

    __slots__ = ("__weakref__", "lowered", "tensors", "versions")

    def __init__(self, lowered: Lowered, tensors: tuple[Any, ...], inputs: tuple[Any, ...]) -> None:
        self.lowered = lowered
        self.tensors = tensors
        self.versions = tuple(
            (weakref.ref(tensor), tensor._version)
            for tensor in inputs
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference()
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


class Program:
    """The pair of functions that AOTAutograd calls for one captured graph."""

    def __init__(
        self,
        captured: Captured,
        choose: Callable[[Program], Lowered],
        on_forward: Callable[[Program, Saved], None],
        on_backward: Callable[[Program], None],
    ) -> None:
        self.captured = captured
        self._watched = [place for place, node in enumerate(captured.inputs()) if node not in captured.mutated]
        self._choose = choose
        self._on_forward = on_forward
        self._on_backward = on_backward

    def forward(self, boxed: list[Any]) -> list[Any]:
        lowered = self._choose(self)
        watched = [boxed[place] for place in self._watched]
        outputs, tensors = lowered.forward(boxed)
        kept = {id(tensor) for tensor in tensors}
        saved = Saved(lowered, tensors, tuple(tensor for tensor in watched if id(tensor) in kept))
        del watched, tensors
        token = torch.empty(0)
        token.remat_saved = saved  # type: ignore[attr-defined]
        self._on_forward(self, saved)
        return [*outputs, token]

    def backward(self, boxed: list[Any]) -> tuple[Any, ...]:
        self._on_backward(self)
        token = boxed.pop(0)
        saved: Saved | None = token.remat_saved
        if saved is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: its saved tensors were freed by the first "
                "backward; pass retain_graph=True there."
            )
        saved.check_versions()
        if not keeps_graph():
            token.remat_saved = None
        run = saved.lowered.backward
        arguments = [*saved.tensors, *boxed]
        boxed.clear()
        del saved, token
        return run(arguments)


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
