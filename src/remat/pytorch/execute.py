"""Lowered graphs behind AOTAutograd's autograd function.

AOTAutograd asks a partitioner for a forward and a backward graph and wraps them so that aliases, mutated inputs and
autocast behave as in eager. `partition` hands it two shells: forward returns the outputs and one empty tensor, the
token, and backward takes that token. What backward really needs travels on the token, so the schedule can change
between steps without tracing the model again, and saved tensors die one by one during backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.fx import Graph, GraphModule, Node

from remat.pytorch._compat import FakeTensor, keeps_graph
from remat.pytorch.capture import Captured
from remat.pytorch.lower import Lowered


class Saved:
    """What one forward call leaves for its backward call."""

    __slots__ = ("__weakref__", "lowered", "output_addresses", "tensors", "versions")

    def __init__(
        self, lowered: Lowered, tensors: tuple[Any, ...], inputs: Iterable[Any], outputs: Iterable[Any]
    ) -> None:
        self.lowered = lowered
        self.tensors = tensors
        kept = {id(tensor) for tensor in tensors}
        self.versions = tuple(
            (weakref.ref(tensor), tensor._version)
            for tensor in inputs
            if id(tensor) in kept and isinstance(tensor, torch.Tensor) and not tensor.is_inference()
        )
        self.output_addresses = tuple(
            int(tensor.untyped_storage()._cdata) for tensor in outputs if isinstance(tensor, torch.Tensor)
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
    """The pair of functions that AOTAutograd calls for one captured graph; `conductor` says what they run."""

    def __init__(self, captured: Captured, conductor: Conductor) -> None:
        self.captured = captured
        self._conductor = conductor
        # What the step itself updates after forward may change; everything else that backward reads must not.
        self._watched = [place for place, node in enumerate(captured.inputs()) if node not in captured.mutated]

    def forward(self, boxed: list[Any]) -> list[Any]:
        lowered = self._conductor.before_forward(boxed)
        watched = [boxed[place] for place in self._watched]
        outputs, tensors = lowered.forward(boxed)
        saved = Saved(lowered, tensors, watched, outputs)
        del watched, tensors
        token = torch.empty(0)
        token.remat_saved = saved  # type: ignore[attr-defined]
        self._conductor.after_forward(saved)
        return [*outputs, token]

    def backward(self, boxed: list[Any]) -> tuple[Any, ...]:
        self._conductor.before_backward()
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


class Conductor(Protocol):
    """Told when a program's forward or backward starts; chooses what forward runs."""

    def before_forward(self, inputs: Sequence[Any]) -> Lowered: ...

    def after_forward(self, saved: Saved) -> None: ...

    def before_backward(self) -> None: ...


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
