"""Finds a linear layer under a cross entropy in Dynamo's graph and lets both be computed in chunks.

In comes the graph that Dynamo hands to a backend, out goes the same graph with `chunked_linear_cross_entropy` in place
of every loss whose logits nobody else looks at. Between the linear layer and the loss there may be casts to wider
types, reshapes of the rows and slices of them; hidden states are reshaped and sliced before the linear layer instead.
Logits may also be scaled, capped by a hyperbolic tangent, or get a number each added that is not trained.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from remat.core.budget import format_bytes
from remat.inductor.loss.chunked import PointwiseStep, choose_chunks, chunk_bytes, chunked_linear_cross_entropy

_CASTS = frozenset({"float", "double", "bfloat16", "to", "type", "type_as", "contiguous"})
_RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"})
_PRODUCTS = frozenset({"matmul", "mm", "addmm", "linear"})
_TRANSPOSES = frozenset({"t", "T", "mT", "transpose", "swapaxes", "permute"})
_SCALINGS: Mapping[str, Literal["times", "over"]] = {"mul": "times", "truediv": "over", "div": "over"}
_TYPES = (torch.bfloat16, torch.float32, torch.float64)
_WORTH_CHUNKS_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class LossRegion:
    """The logits of one loss, by their sizes: (rows, vocabulary) from hidden states of `width` features."""

    rows: int
    vocabulary: int
    width: int
    logits_dtype: torch.dtype

    @property
    def logits_bytes(self) -> int:
        """One full tensor of logits; a compiled step holds up to three of them."""
        return self.chunk_bytes(1)

    def chunk_bytes(self, chunks: int) -> int:
        """The logits of one chunk; a chunked loss holds one of them."""
        return chunk_bytes(self.rows, self.vocabulary, self.logits_dtype, chunks)


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A loss that is now computed in chunks."""

    region: LossRegion
    chunks: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A loss that is computed as the model says, and why, in one sentence."""

    reason: str


class _NotChunkable(Exception):
    """Why a loss cannot be computed in chunks."""


@dataclass(frozen=True, slots=True)
class _Reshape:
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Slice:
    index: Any


@dataclass(frozen=True, slots=True)
class _Pointwise:
    step: PointwiseStep
    shift: Node | None = None


@dataclass(frozen=True, slots=True)
class _Linear:
    """`hidden @ weight.t() + bias`, where `weight` may have to be transposed first."""

    node: Node
    hidden: Node
    weight: Node
    transpose: bool
    bias: Node | None


_Step = _Reshape | _Slice | _Pointwise


@dataclass(frozen=True, slots=True)
class Loss:
    """One loss that can be computed in chunks, and the nodes of its graph that this takes."""

    region: LossRegion
    replaced: tuple[Node, ...]
    linear: _Linear
    steps: tuple[_Reshape | _Slice, ...]
    pointwise: tuple[_Pointwise, ...]
    labels: Node
    divisor: Node | float | None
    arguments: dict[str, Any]


def rewrite_loss(module: GraphModule, chunks: int | Callable[[LossRegion], int]) -> tuple[Rewritten | Kept, ...]:
    """Rewrite every loss in `module` that can be, in place; one result for each loss under a linear layer.

    `chunks` is how many chunks to make, or how to choose them for a region; 0 leaves the loss as it is.
    """
    results = tuple(loss if isinstance(loss, Kept) else _rewrite(module, loss, chunks) for loss in find_losses(module))
    if any(isinstance(result, Rewritten) for result in results):
        module.graph.lint()
        module.recompile()
    return results


def chunks_for(region: LossRegion, limit_bytes: int | None = None) -> int:
    """How many chunks a region is worth; see `choose_chunks`. 0 where its logits are too small to matter."""
    if region.logits_bytes < _WORTH_CHUNKS_BYTES:
        return 0
    return choose_chunks(region.rows, region.vocabulary, region.logits_dtype, limit_bytes=limit_bytes)


def _rewrite(module: GraphModule, loss: Loss, chunks: int | Callable[[LossRegion], int]) -> Rewritten | Kept:
    count = chunks if isinstance(chunks, int) else chunks(loss.region)
    if count < 1:
        return Kept(f"logits of {format_bytes(loss.region.logits_bytes)} are not worth chunks")
    _replace(module.graph, loss, count)
    return Rewritten(loss.region, count)


def find_losses(module: GraphModule) -> tuple[Loss | Kept, ...]:
    """Every cross entropy of a linear layer's outputs: what a rewrite would replace, or why there will be none."""
    found: list[Loss | Kept] = []
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is F.cross_entropy:
            try:
                found.append(_recognize(node))
            except _NotChunkable as reason:
                found.append(Kept(str(reason)))
    return tuple(found)


def _recognize(node: Node) -> Loss:
    arguments = _loss_arguments(node)
    logits, labels = arguments.pop("input"), arguments.pop("target")
    found, passed, linear = _trace_back(logits, node)
    steps = tuple(step for step in found if not isinstance(step, _Pointwise))
    pointwise = tuple(step for step in found if isinstance(step, _Pointwise))
    if sum(step.shift is not None for step in pointwise) > 1:
        raise _NotChunkable("two tensors are added to the logits")
    region = _region(logits, linear)
    _refuse_unusual(region, labels, linear, node)
    last, divisor = _division(node)
    replaced = (*((last,) if last is not node else ()), node, *passed, linear.node)
    arguments["logits_dtype"], arguments["loss_dtype"] = region.logits_dtype, _tensor(last).dtype
    return Loss(region, replaced, linear, steps, pointwise, labels, divisor, arguments)


def _loss_arguments(node: Node) -> dict[str, Any]:
    bound = inspect.signature(F.cross_entropy).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    if given.pop("weight") is not None:
        raise _NotChunkable("the loss weighs its classes")
    if given.pop("size_average") is not None or given.pop("reduce") is not None:
        raise _NotChunkable("the loss uses deprecated arguments of cross_entropy")
    if given["reduction"] not in ("mean", "sum"):
        raise _NotChunkable("the loss is not reduced to one number")
    if not isinstance(given["ignore_index"], int) or not isinstance(given["label_smoothing"], (int, float)):
        raise _NotChunkable("the loss takes arguments that are computed in the graph")
    return given


def _trace_back(node: Any, user: Node) -> tuple[tuple[_Step, ...], tuple[Node, ...], _Linear]:
    """From the loss to the linear layer: what happens to logits on the way (in the model's order), and every node."""
    steps: list[_Step] = []
    passed: list[Node] = []
    while True:
        _refuse_other_users(node, user)
        name = _name(node)
        if name in _PRODUCTS:
            return tuple(reversed(steps)), tuple(passed), _read_linear(node, name)
        before = _logits_among(node, name)
        step = _read_pointwise(node, name, before) or _read_step(node, name)
        steps.extend(() if step is None else (step,))
        passed.append(node)
        node, user = before, node


def _refuse_other_users(node: Any, user: Node) -> None:
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        raise _NotChunkable("the logits do not come from a linear layer of this graph")
    others = [other for other in node.users if other is not user]
    if any(other.op == "output" for other in others):
        size = format_bytes(_tensor(node).numel() * _tensor(node).itemsize)
        raise _NotChunkable(f"the logits are returned; return only the loss to save {size}")
    if others:
        raise _NotChunkable(f"the logits are also used by `{others[0].name}`")


def _name(node: Node) -> str:
    """The name of the tensor method or torch function that `node` calls."""
    if node.op == "call_method":
        return str(node.target).removeprefix("__").removesuffix("__")
    return str(getattr(node.target, "__name__", node.target))


def _tensor(node: Any) -> Tensor:
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    if not isinstance(value, Tensor):
        raise _NotChunkable(f"nothing is known about `{node}`")
    if not all(isinstance(size, int) for size in value.shape):
        raise _NotChunkable("the sizes around the loss are dynamic")
    return value


def _logits_among(node: Node, name: str) -> Any:
    """The argument of `node` that the logits come in by: of a sum or a product it may be either, the larger one."""
    if name in ("add", "mul") and len(node.args) == 2:
        return max(node.args, key=lambda part: _tensor(part).numel() if isinstance(part, Node) else 0)
    return node.args[0]


def _read_pointwise(node: Node, name: str, before: Any) -> _Pointwise | None:
    """The change of every number for itself that `node` is, if it is one."""
    if node.kwargs or not isinstance(before, Node) or _tensor(before).shape != _tensor(node).shape:
        return None
    if torch.promote_types(_tensor(before).dtype, _tensor(node).dtype) != _tensor(node).dtype:
        return None
    if name == "tanh" and len(node.args) == 1:
        return _Pointwise(("tanh", 0.0))
    if len(node.args) != 2 or node.args[0] is node.args[1]:
        return None
    other = node.args[1] if node.args[0] is before else node.args[0]
    if name in _SCALINGS and type(other) in (int, float):
        return _Pointwise((_SCALINGS[name], float(other))) if math.isfinite(other) and other else None
    if name != "add" or not isinstance(other, Node):
        return None
    shift = _tensor(other)
    columns = _tensor(before).shape[-1:]
    fits = shift.shape[-1:] == columns and shift.numel() == columns.numel()
    return _Pointwise(("plus", 0.0), other) if fits and not shift.requires_grad else None


def _read_step(node: Node, name: str) -> _Reshape | _Slice | None:
    before, after = _tensor(node.args[0]), _tensor(node)
    same_columns = before.shape[-1:] == after.shape[-1:]
    if name in _CASTS and before.shape == after.shape and before.device == after.device:
        if torch.promote_types(before.dtype, after.dtype) != after.dtype:
            raise _NotChunkable("the logits are rounded before the loss")
        return None
    if name in _RESHAPES and same_columns and before.dtype == after.dtype and before.numel() == after.numel():
        return _Reshape(tuple(after.shape[:-1]))
    if node.target is operator.getitem and _keeps_columns(node.args[1], before.dim()):
        return _Slice(node.args[1])
    raise _NotChunkable(f"`{node.name}` stands between the linear layer and the loss")


def _keeps_columns(index: Any, dimensions: int) -> bool:
    """Whether `index` takes whole rows: slices and numbers for leading dimensions only."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or _is_plain(part) for part in parts):
        return False
    if parts and parts[-1] is Ellipsis or len(parts) < dimensions and Ellipsis not in parts:
        return True
    last = parts[-1] if parts else slice(None)
    return isinstance(last, slice) and last.start in (None, 0) and last.stop is None and last.step in (None, 1)


def _is_plain(part: Any) -> bool:
    if isinstance(part, slice):
        return all(item is None or type(item) is int for item in (part.start, part.stop, part.step))
    return type(part) is int


def _read_linear(node: Node, name: str) -> _Linear:
    if name == "linear":
        hidden, weight, linear_bias = _linear_arguments(*node.args, **node.kwargs)
        return _Linear(node, hidden, weight, False, linear_bias)
    if node.kwargs or len(node.args) != (3 if name == "addmm" else 2):
        raise _NotChunkable(f"`{node.name}` takes arguments that a linear layer does not have")
    *bias, hidden, right = node.args
    if _tensor(right).dim() != 2 or _tensor(hidden).dim() < 2:
        raise _NotChunkable(f"`{node.name}` is not the product of rows and one matrix")
    if bias and _tensor(bias[0]).dim() != 1:
        raise _NotChunkable(f"`{node.name}` adds a matrix")
    source = _untransposed(right)
    return _Linear(node, hidden, right if source is None else source, source is None, bias[0] if bias else None)


def _linear_arguments(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    return input, weight, bias


def _untransposed(right: Any) -> Any:
    """What `right` is the transpose of; None where that is not seen."""
    name = right.args[1] if right.target is getattr else _name(right)
    if right.op not in ("call_function", "call_method") or name not in _TRANSPOSES:
        return None
    source = right.args[0]
    # A permutation may also leave a matrix as it is.
    return source if _tensor(source).stride() == _tensor(right).stride()[::-1] else None


def _region(logits: Node, linear: _Linear) -> LossRegion:
    value, hidden = _tensor(logits), _tensor(linear.hidden)
    if value.dim() != 2:
        raise _NotChunkable("the classes of the loss are not its last dimension")
    rows, vocabulary = value.shape
    return LossRegion(rows, vocabulary, hidden.shape[-1], _tensor(linear.node).dtype)


def _refuse_unusual(region: LossRegion, labels: Any, linear: _Linear, node: Node) -> None:
    if _tensor(labels).is_floating_point() or _tensor(labels).dim() != 1:
        raise _NotChunkable("the labels of the loss are probabilities")
    if region.logits_dtype == torch.float16:
        raise _NotChunkable("float16 gradients need the scale of the loss, which only backward knows")
    if region.logits_dtype not in _TYPES:
        raise _NotChunkable(f"logits in {region.logits_dtype} are not supported")
    parameters = [part for part in (linear.hidden, linear.weight, linear.bias) if part is not None]
    if any(_tensor(part).requires_grad for part in parameters) and not _tensor(linear.node).requires_grad:
        raise _NotChunkable("gradients are switched off for the linear layer alone")
    changed = next(filter(_changes_floats, _between(linear.node, node)), None)
    if changed is not None:
        raise _NotChunkable(f"`{changed.name}` changes a tensor between the linear layer and the loss")


def _between(first: Node, last: Node) -> Iterator[Node]:
    node = first.next
    while node is not last:
        yield node
        node = node.next


def _changes_floats(node: Node) -> bool:
    """Whether `node` writes to a tensor that the linear layer might read, which will now run later."""
    name = _name(node)
    in_place = name.endswith("_") or node.target in (operator.setitem, operator.iadd, operator.imul, operator.isub)
    if not in_place and "out" not in node.kwargs or not node.args or not isinstance(node.args[0], Node):
        return False
    value = node.args[0].meta.get("example_value")
    return isinstance(value, Tensor) and value.is_floating_point()


def _division(node: Node) -> tuple[Node, Node | float | None]:
    """The number that nothing but this loss is divided by, as by a count of tokens, and the node with the result."""
    (user,) = node.users if len(node.users) == 1 else (None,)
    if user is None or _name(user) not in ("truediv", "div") or len(user.args) != 2 or user.kwargs:
        return node, None
    divisor = user.args[1]
    if user.args[0] is not node:
        return node, None
    if isinstance(divisor, (int, float)):
        return user, divisor
    value = divisor.meta.get("example_value") if isinstance(divisor, Node) else None
    if not isinstance(value, Tensor) or value.dim() > 0 or value.requires_grad or value.device != _tensor(node).device:
        return node, None
    return user, divisor


def _replace(graph: Graph, loss: Loss, chunks: int) -> None:
    last = loss.replaced[0]
    with graph.inserting_before(last):
        hidden = _apply_steps(graph, loss)
        weight = graph.call_method("t", (loss.linear.weight,)) if loss.linear.transpose else loss.linear.weight
        shift = next((step.shift for step in loss.pointwise if step.shift is not None), None)
        args = (hidden, weight, loss.linear.bias, loss.labels, loss.divisor, shift)
        how = {"chunks": chunks, "pointwise": tuple(step.step for step in loss.pointwise), **loss.arguments}
        call = graph.call_function(chunked_linear_cross_entropy, args, how)
    call.meta = dict(last.meta)
    last.replace_all_uses_with(call)
    for node in loss.replaced:
        graph.erase_node(node)


def _apply_steps(graph: Graph, loss: Loss) -> Node:
    """The hidden states whose logits the loss sees."""
    hidden = loss.linear.hidden
    value = _tensor(hidden)
    for step in loss.steps:
        if isinstance(step, _Slice):
            hidden, value = graph.call_function(operator.getitem, (hidden, step.index)), value[step.index]
        elif step.rows != tuple(value.shape[:-1]):
            shape = (*step.rows, loss.region.width)
            hidden, value = graph.call_method("reshape", (hidden, shape)), value.reshape(shape)
        hidden.meta.setdefault("example_value", value)
    return hidden
