"""Gradients that are differentiated again (`create_graph=True`), as gradient penalties and second-order optimizers do.

In: the function that runs a captured graph, and the graph. Out: the same function, whose autograd node has hooks. A
planned backward is one op to autograd, and AOTAutograd lets nobody differentiate it. Where the gradients of a backward
are to be differentiated, a hook runs the graph once more as it is, from the inputs and the generator's state of its
call, and puts autograd's own gradients in the place of the planned ones.
"""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.fx import GraphModule, Node

from remat.pytorch._compat.checkpointed import has_checkpoints, run_checkpoints_as_eager
from remat.pytorch._compat.engine import COMPILED_NODE
from remat.pytorch._compat.tensors import base_of, version_of
from remat.pytorch.rng import RngState

Gradients = Sequence[torch.Tensor | None]

DRAWING = ("drop", "rand", "bernoulli", "normal", "multinomial", "poisson", "exponential", "attention", "rrelu")
"""In the names of ops that may draw random numbers."""
SHARES = {"dropout": (1, "p", 0.5), "scaled_dot_product_attention": (4, "dropout_p", 0.0)}
"""Where such an op is told of which share of its input it makes zeros, and what it takes untold: none draws nothing."""
NORM = "batch_norm"
"""A function that writes to the buffers at places 1 and 2 and does not read them while it trains (place 5)."""


class PlainGraph:
    """A captured graph as plain PyTorch runs it, and what is known of it for all calls."""

    def __init__(self, module: GraphModule, *, draws_as_eager: bool = True) -> None:
        self._module = module
        graphs = [part.graph for part in module.modules() if isinstance(part, GraphModule)]
        self.draws = any(_may_draw(node) for graph in graphs for node in graph.nodes)
        self.draws_otherwise = self.draws and not draws_as_eager
        """Whether its masks would be others than those of the step."""
        self.device_types: tuple[str, ...] = ()
        self.data: tuple[int, ...] = ()
        """Places of the inputs that are neither parameters nor written to."""
        self.updated: tuple[int, ...] | None = None
        """Places of those that a call writes to; None before the first."""
        self._was_told = False

    def meet(self, inputs: Sequence[Any]) -> None:
        """The first call begins."""
        kinds = {item.device.type for item in inputs if isinstance(item, torch.Tensor)}
        self.device_types = tuple(sorted(kinds - {"meta"}, key=lambda kind: kind == "cpu")) or ("cpu",)
        tensors = (place for place, item in enumerate(inputs) if isinstance(item, torch.Tensor))
        self.data = tuple(place for place in tensors if not isinstance(inputs[place], nn.Parameter))

    def learn(self, updated: Iterable[int]) -> None:
        """The first call has returned."""
        self.updated = tuple(updated)
        self.data = tuple(place for place in self.data if place not in self.updated)

    @functools.cached_property
    def run(self) -> Callable[..., Any]:
        # It may still be traced for other sizes, with the user's checkpoints as Dynamo wrote them.
        module = copy.deepcopy(self._module) if has_checkpoints(self._module) else self._module
        run_checkpoints_as_eager(module)
        forward: Callable[..., Any] = module.forward
        return forward

    def only_updates(self, place: int) -> bool:
        """Whether what the graph computes does not depend on this input, to which it writes."""
        inputs = self._module.graph.find_nodes(op="placeholder")
        return all(_only_updates(user, inputs[place]) for user in inputs[place].users)

    def tell(self) -> None:
        """Once for each graph."""
        if not self._was_told:
            self._was_told = True
            warnings.warn(
                "Gradients of this step are differentiated again (create_graph=True), which planned ones cannot be: "
                "for these the model runs once more as plain PyTorch, outside the budget.",
                stacklevel=2,
            )


def differentiable_again(
    compiled: Callable[..., Any], module: GraphModule, *, draws_as_eager: bool = True
) -> Callable[..., Any]:
    """`compiled`, which runs `module`, for callers who may differentiate its gradients."""
    plain = PlainGraph(module, draws_as_eager=draws_as_eager)

    def call(*inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return compiled(*inputs)
        if plain.updated is None:
            plain.meet(inputs)
        again = Again(plain, inputs)
        outputs = compiled(*inputs)
        if plain.updated is None:
            plain.learn(again.changed(inputs))
        again.watch(outputs)
        return outputs

    return call


class CannotRunAgain(Exception):
    """Why a graph cannot run again as it ran."""


class Refusing(torch.autograd.Function):
    """Gradients that say why they cannot be differentiated, if they are; alone they would be taken for constants."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, why: str, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.why = why
        return gradients

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise RuntimeError(
            f"Gradients of this step cannot be differentiated again (create_graph=True): {ctx.why}. Leave the model "
            "that they are of out of remat.optimize."
        )


def refusing(gradients: Gradients, why: str) -> tuple[torch.Tensor | None, ...]:
    anchor = torch.empty(0, requires_grad=True)
    found = iter(Refusing.apply(anchor, why, *(item for item in gradients if item is not None)))
    return tuple(None if item is None else next(found) for item in gradients)


@dataclass(frozen=True, slots=True)
class OutputOfNode:
    """An output of the autograd node, as the graph returns it."""

    place: int
    is_base: bool
    """Whether it is what that output of the graph is a view of."""


class Again:
    """Enough to run a graph as it ran in one call. Autograd calls it after a backward that may be differentiated."""

    def __init__(self, plain: PlainGraph, inputs: Sequence[Any]) -> None:
        self._plain = plain
        self._inputs = list(inputs)
        self._versions = {place: version_of(inputs[place]) for place in plain.data if not inputs[place].is_inference()}
        for place in plain.data:
            # Data that nobody needs any more is gone: holding it would take memory from every step.
            self._inputs[place] = weakref.ref(inputs[place])
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in plain.device_types
        ]
        self._rng = state_of(plain.device_types[0]) if plain.draws else None
        self._node: Callable[[], Any] = lambda: None
        self._waits = False
        """Whether to be called when backward is over."""
        self._made: dict[int, OutputOfNode] = {}

    def changed(self, inputs: Sequence[Any]) -> list[int]:
        """Places of the data that was written to since, and that no call writes to."""
        known = ((place, self._versions[place]) for place in self._plain.data if place in self._versions)
        return [place for place, version in known if version_of(inputs[place]) != version]

    def watch(self, outputs: Sequence[Any]) -> None:
        """The call has returned: be called after its backward, if it can have one."""
        node, self._made = _outputs_of_node(outputs)
        if node is not None:
            self._node = weakref.ref(node)
            node.register_prehook(self.prepare)

    def prepare(self, _: Gradients) -> None:
        """Backward of the call begins."""
        # A hook that is always there would have autograd hold incoming gradients until backward is over.
        if torch.is_grad_enabled() and not self._waits:
            self._waits = True
            self._node().register_hook(self)

    # A backward within a forward that Dynamo has broken off runs under its eyes, and all that it calls.
    @torch.compiler.disable
    def __call__(self, gradients: Gradients, incoming: Gradients) -> tuple[torch.Tensor | None, ...] | None:
        """Autograd's gradients in the place of planned ones, where they may be differentiated."""
        if not torch.is_grad_enabled() or all(item is None for item in gradients):
            return None
        try:
            inputs = self._as_they_were()
            sources = self._sources(inputs, gradients)
            given = {number: item for number, item in enumerate(incoming) if item is not None}
            if not given.keys() <= self._made.keys():
                raise CannotRunAgain("one of its outputs is not the model's own")
        except CannotRunAgain as error:
            return refusing(gradients, str(error))
        self._plain.tell()
        outputs = self._run(inputs)
        roots = [_root(outputs, self._made[number]) for number in given]
        wanted = [source for source in sources if source is not None]
        found = iter(torch.autograd.grad(roots, wanted, list(given.values()), create_graph=True, allow_unused=True))
        return tuple(None if source is None else next(found) for source in sources)

    def _as_they_were(self) -> list[Any]:
        """What the call was given."""
        if self._plain.draws_otherwise:
            raise CannotRunAgain("compiled code draws random numbers of its own")
        if self._plain.draws and self._rng is None:
            raise CannotRunAgain("a CUDA graph was captured meanwhile, whose random numbers are drawn when it runs")
        updated = self._plain.updated or ()
        inputs: list[Any] = [item() if isinstance(item, weakref.ref) else item for item in self._inputs]
        if any(inputs[place] is None for place in (*self._plain.data, *updated)) or self.changed(inputs):
            raise CannotRunAgain("a tensor that it was given is gone, or has changed since")
        if not all(self._plain.only_updates(place) for place in updated):
            raise CannotRunAgain("it reads a buffer that it updates")
        return [item.clone() if place in updated else item for place, item in enumerate(inputs)]

    def _sources(self, inputs: Sequence[Any], gradients: Gradients) -> list[torch.Tensor | None]:
        """The input that each gradient belongs to."""
        edges = self._node().next_functions
        by_edge = {
            (edge.node, edge.output_nr): item
            for item in inputs
            if isinstance(item, torch.Tensor) and item.requires_grad
            for edge in (get_gradient_edge(item),)
        }
        pairs = list(zip(gradients, edges, strict=True)) if len(gradients) == len(edges) else []
        if not pairs or any(item is not None and edge not in by_edge for item, edge in pairs):
            raise CannotRunAgain("one of its inputs was changed in place")
        return [None if item is None else by_edge[edge] for item, edge in pairs]

    def _run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        with ExitStack() as stack:
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
            if self._rng is None:
                return list(self._plain.run(*inputs))
            return list(self._rng.replay(self._plain.run, *inputs))


def state_of(device_type: str) -> RngState | None:
    """The generator's, where it may be asked for."""
    if device_type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    return RngState(device_type)


def _outputs_of_node(outputs: Sequence[Any]) -> tuple[Any, dict[int, OutputOfNode]]:
    """The autograd node of a call, and what its outputs are."""
    node: Any = None
    made: dict[int, OutputOfNode] = {}
    for place, output in enumerate(outputs):
        for item, is_base in _with_base(output):
            if type(item.grad_fn).__name__ == COMPILED_NODE and node in (None, item.grad_fn):
                node = item.grad_fn
                made.setdefault(item.output_nr, OutputOfNode(place, is_base))
    return node, made


def _with_base(output: Any) -> Iterator[tuple[torch.Tensor, bool]]:
    if isinstance(output, torch.Tensor):
        yield output, False
        base = base_of(output)
        if base is not None:
            yield base, True


def _root(outputs: Sequence[Any], made: OutputOfNode) -> torch.Tensor:
    output: torch.Tensor = outputs[made.place]
    base = base_of(output) if made.is_base else None
    return output if base is None else base


def _may_draw(node: Node) -> bool:
    name = _name(node)
    if name in SHARES:
        place, keyword, untold = SHARES[name]
        return _argument(node, place, keyword, untold) != 0.0
    return any(word in name for word in DRAWING)


def _argument(node: Node, place: int, keyword: str, untold: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(keyword, untold)


def _name(node: Node) -> str:
    return getattr(node.target, "__name__", str(node.target)).lower()


def _only_updates(user: Node, buffer: Node) -> bool:
    places = [place for place, item in enumerate(user.args) if item is buffer]
    if _name(user) == NORM:
        return _argument(user, 5, "training") is True and places in ([1], [2])
    return user.op == "call_method" and _name(user).endswith("_") and not user.users and places == [0]
