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

from remat.pytorch._compat.engine import keeps_graph
from remat.pytorch._compat.fakes import FakeTensor
from remat.pytorch._compat.symbols import Sizes, Symbols, layout_at
from remat.pytorch._compat.tensors import is_view, mark_boxed, version_of
from remat.pytorch._compat.tracing import leave_absent_gradients_absent
from remat.pytorch.graph.capture import Captured, updated_and_read
from remat.pytorch.graph.nodes import is_computed
from remat.pytorch.graph.open_sizes import OPEN
from remat.pytorch.rng import RngState
from remat.pytorch.run.gradients.hand_over import HandedOver, handed_places, handing_over
from remat.pytorch.run.lower import Lowered

Versions = tuple[tuple[weakref.ref[torch.Tensor], int], ...]
"""Tensors and how often each had been written to."""


class Rerun:
    """Enough to run a forward again: its inputs as they were, and the generator's state."""

    __slots__ = ("_inputs", "_rng", "_versions")

    def __init__(
        self, inputs: Sequence[Any], updated: frozenset[int], watched: Sequence[Any], device_type: str
    ) -> None:
        # The step itself updates these after forward; their bytes are `Variant.copied_bytes`.
        self._inputs = [item.clone() if place in updated else item for place, item in enumerate(inputs)]
        self._versions = _versions(watched)
        self._rng = RngState(device_type)

    def run(self, forward: Callable[[list[Any]], Any]) -> Any:
        _check_versions(self._versions)
        return self._rng.replay(forward, list(self._inputs))


class Saved:
    """What one forward call leaves for its backward call."""

    __slots__ = ("__weakref__", "absent", "handed", "kept", "lowered", "rerun", "sizes", "tensors", "versions")

    def __init__(self, chosen: Chosen, rerun: Rerun | None, handed: HandedOver | None, sizes: Sizes) -> None:
        self.lowered = chosen.lowered
        self.absent = chosen.absent
        self.rerun = rerun
        """There where some outputs are taken to receive no gradient."""
        self.handed = handed
        """There where some gradients are used up in the middle of backward."""
        self.sizes = sizes
        """Of the call, where the graph leaves some open."""
        self.kept = 0
        """Backwards so far that another one may follow."""
        self.tensors: tuple[Any, ...] = ()
        self.versions: Versions = ()

    def fill(self, tensors: tuple[Any, ...], watched: Iterable[Any]) -> None:
        """Forward has run: note what it saved and the versions of inputs that backward reads."""
        self.tensors = tensors
        kept = {id(tensor) for tensor in tensors}
        self.versions = _versions(tensor for tensor in watched if id(tensor) in kept)

    def check_versions(self) -> None:
        """Refuse as eager does when an input that backward reads was changed in between."""
        _check_versions(self.versions)


def _versions(tensors: Iterable[Any]) -> Versions:
    return tuple(
        (weakref.ref(tensor), version_of(tensor))
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and not tensor.is_inference()
    )


def _check_versions(versions: Versions) -> None:
    for reference, version in versions:
        tensor = reference()
        if tensor is not None and version_of(tensor) != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tuple(tensor.shape)} is at version {version_of(tensor)}; expected version {version} instead."
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

    def holds_incoming(self) -> None:
        """Whoever called backward still holds incoming gradients that it has done with."""

    def keeps_gradients(self) -> None:
        """A hook has left a gradient in memory that was taken to be used up."""

    def surprised(self) -> tuple[Lowered, frozenset[int]]:
        """An output that was taken to receive no gradient has one: what to run now, and what it leaves out."""


class Program:
    """The pair of functions that AOTAutograd calls for one captured graph; `conductor` says what they run."""

    def __init__(self, captured: Captured, conductor: Conductor, symbols: Symbols | None = None) -> None:
        self._conductor = conductor
        self._symbols = symbols
        self._tangents = [_traced(node) for node in captured.tangents()]
        self._device_type = captured.device.type
        self._updated = updated_and_read(captured)
        # What the step itself updates after forward may change; everything else that backward reads must not.
        self._watched = [place for place, node in enumerate(captured.inputs()) if node not in captured.mutated]
        self._handed = handed_places(captured)
        self._computed = {place for place, node in enumerate(captured.forward_outputs) if is_computed(node)}

    def forward(self, boxed: list[Any]) -> list[Any]:
        leave_absent_gradients_absent()
        chosen = self._conductor.before_forward(boxed)
        watched = [boxed[place] for place in self._watched]
        # Should a gradient arrive that was not expected, forward runs again.
        saved = Saved(
            chosen,
            Rerun(boxed, self._updated, watched, self._device_type) if chosen.absent else None,
            HandedOver(boxed, self._handed) if self._handed else None,
            self._symbols.read(boxed) if self._symbols is not None else (),
        )
        outputs, tensors = chosen.lowered.forward(boxed)
        # Written into a view of another result, an output would be one too, which the caller must not change in place.
        outputs = tuple(_own(item) if place in self._computed else item for place, item in enumerate(outputs))
        saved.fill(tensors, watched)
        del watched, tensors
        token = torch.empty(0)
        token.remat_saved = saved
        self._conductor.after_forward(saved, outputs)
        return [*outputs, token]

    # torch 2.11 calls it with gradients on where they are to be differentiated again, which these cannot be.
    @torch.no_grad()
    def backward(self, boxed: list[Any]) -> tuple[Any, ...]:
        token = boxed.pop(0)
        saved: Saved | None = token.remat_saved
        if saved is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: its saved tensors were freed by the first "
                "backward; pass retain_graph=True there."
            )
        saved.check_versions()
        saved.kept += keeps_graph()
        self._conductor.before_backward(saved, boxed)
        if not keeps_graph():
            token.remat_saved = None
        run, tensors = self._backward_of(saved, boxed)
        done = self._conductor.after_backward(saved)
        incoming = [
            weakref.ref(item.untyped_storage()) for item in boxed if isinstance(item, torch.Tensor) and item.dim()
        ]
        arguments = [*tensors, *self._tangents_or_zeros(saved, boxed)]
        boxed.clear()
        handed = saved.handed
        del saved, token, tensors
        with handing_over(handed):
            gradients = run(arguments)
        if handed is not None and handed.kept:
            self._conductor.keeps_gradients()
        if _are_held(incoming, gradients):
            self._conductor.holds_incoming()
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
        assert saved.rerun is not None, "an output was left out without enough to run forward again"
        _, tensors = saved.rerun.run(lowered.forward)
        if not keeps_graph():
            return lowered.backward, tensors
        # A second backward finds what this one would have saved.
        saved.lowered, saved.tensors = lowered, tensors
        return lowered.backward_keeping, tensors

    def _tangents_or_zeros(self, saved: Saved, tangents: Sequence[Any]) -> Iterator[Any]:
        for number, (tangent, fake) in enumerate(zip(tangents, self._tangents, strict=True)):
            if tangent is None and number not in saved.absent:
                # In the layout that the graph was captured for: it may hold views that fit no other.
                shape, stride = self._layout(fake, saved.sizes)
                yield torch.empty_strided(shape, stride, dtype=fake.dtype, device=fake.device).zero_()
            else:
                yield tangent

    def _layout(self, fake: torch.Tensor, sizes: Sizes) -> tuple[Sequence[int], Sequence[int]]:
        symbols = self._symbols
        if symbols is None:
            return fake.shape, fake.stride()
        shape, stride, _ = layout_at(fake, lambda amount: symbols.amount(amount, sizes))
        return shape, stride


def _traced(node: Node) -> Any:
    """What tracing found, with sizes left open where it left them so."""
    return node.meta.get(OPEN, node.meta["val"])


def _own(item: Any) -> Any:
    return item.detach() if isinstance(item, torch.Tensor) and is_view(item) else item


def _are_held(incoming: Sequence[weakref.ref[Any]], gradients: Iterable[Any]) -> bool:
    """Whether a storage is alive without being that of a result."""
    returned = {id(item.untyped_storage()) for item in gradients if isinstance(item, torch.Tensor)}
    alive = [storage for reference in incoming if (storage := reference()) is not None]
    return any(id(storage) not in returned for storage in alive)


def boxed_call(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark `function` as one that takes its arguments in a list and may empty it."""

    def call(boxed: list[Any]) -> Any:
        return function(boxed)

    mark_boxed(call)
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
    fakes = map(_traced, primals)
    mode = next(fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor))
    with mode:
        return torch.empty(0)


def _declare(graph: Graph, node: Node) -> None:
    graph.placeholder(node.name).meta.update(node.meta, val=_traced(node))


def _stand_in(graph: Graph, item: Any) -> Any:
    if not isinstance(item, Node):
        return item
    node = graph.call_function(torch.empty, (0,))
    node.meta.update(item.meta, val=_traced(item))
    return node
