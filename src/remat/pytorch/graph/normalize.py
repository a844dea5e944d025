"""Small rewrites of a joint graph that change no bits and free the schedule.

- `empty_like(x)` and its kin read only the shape of `x`; as written they would keep `x` in memory.
- Batch norm's backward in training ignores the running statistics it is handed.
- A convolution's backward computes weight and input gradients by different kernels, one after the other; as two ops
  they need less memory and each can run when it suits.
- The backward of cross entropy makes a gradient of the log probabilities only to hand it on: the two ops become one.
- Max pooling keeps an index of eight bytes for each result, of which one byte tells all: where in its window it is.
- A ReLU's backward asks of each result only whether it is positive: where nothing else in backward reads it, a byte is
  kept.
- Zeros and ones that eager draws into a new tensor are drawn in the order of its memory.
- Norms on CPU keep their statistics as precise as their parameters; torch's fake versions, as their input.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from remat.pytorch._compat.tensors import storage_address
from remat.pytorch.graph.open_sizes import OPEN, shape_args, stride_args
from remat.pytorch.graph.pool_ops import Pool
from remat.pytorch.graph.specialize import lay_out_again

aten = torch.ops.aten

_LIKE: dict[Any, float | None] = {
    aten.empty_like.default: None,
    aten.zeros_like.default: 0,
    aten.ones_like.default: 1,
    aten.new_empty.default: None,
    aten.new_zeros.default: 0,
    aten.new_ones.default: 1,
}

_ALIASES = (aten.detach.default, aten.alias.default)
_NORMS = frozenset(
    {
        aten.native_layer_norm.default,
        aten.native_group_norm.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_functional.default,
    }
)


COMPARED_ON = ("cpu", "cuda")
"""Devices where forms of ops that need less memory were compared with eager's, bit for bit; elsewhere eager's run."""


def normalize(graph: Graph, tangents: Sequence[Node] = ()) -> None:
    """Rewrite `graph` in place; `tangents` are its incoming gradients."""
    forward = _forward_nodes(graph, tangents)
    for node in list(graph.nodes):
        if node.target in _LIKE:
            _drop_shape_source(node)
        elif node.target is aten.native_batch_norm_backward.default and node.args[7] is True:
            node.args = _without_running_stats(node)
        elif node.target in _NORMS:
            _correct_statistics(node)
        elif node.target is aten.bernoulli.p and node.args[0].target is aten.empty_strided.default:
            _draw_in_memory_order(node)
        elif _device_type(node) in COMPARED_ON:
            _save_memory(node, forward)
    graph.lint()


def _device_type(node: Node) -> str:
    """Of what the node gives; empty where that is no tensor."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return next((item.device.type for item in values if isinstance(item, torch.Tensor)), "")


def _save_memory(node: Node, forward: set[Node]) -> None:
    """Another form of the op that keeps less for backward, where there is one."""
    if node.target is aten.convolution_backward.default:
        _split_gradients(node)
    elif node.target is aten._log_softmax_backward_data.default:
        _join_with_loss(node)
    elif node.target is aten.max_pool2d_with_indices.default:
        _keep_offsets(node)
    elif node.target is aten.threshold_backward.default:
        _keep_mask(_undetached(node.args[1]), forward)


def _drop_shape_source(node: Node) -> None:
    val = node.meta["val"]
    options = {"dtype": val.dtype, "device": val.device}
    fill = _LIKE[node.target]
    if fill is None:
        node.target = aten.empty_strided.default
        node.args = (shape_args(node, val), stride_args(node, val))
    elif val.is_contiguous():
        node.target = aten.full.default
        node.args = (shape_args(node, val), fill)
    else:
        return
    node.kwargs = options


def _draw_in_memory_order(node: Node) -> None:
    """The functional form of `empty_like(x).bernoulli_(p)`, which several kinds of dropout call."""
    place, share = node.args[0], node.args[1] if len(node.args) > 1 else 0.5
    value = place.meta["val"]
    node.target = torch.ops.remat.bernoulli.default
    traced = place.meta.get(OPEN)
    node.args = (shape_args(node, value, traced), stride_args(node, value, traced), share)
    node.kwargs = {"dtype": value.dtype, "device": value.device}
    is_turned = node.meta["val"].stride() != value.stride()
    with value.fake_mode:
        node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    if is_turned:
        lay_out_again(node.graph, {node})
    if not place.users:
        node.graph.erase_node(place)


def _without_running_stats(node: Node) -> tuple[Any, ...]:
    # (grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask)
    return (*node.args[:3], None, None, *node.args[5:])


def _split_gradients(node: Node) -> None:
    """The weight's and bias's gradients become an op of their own, after the input's: the kernels' order in eager."""
    *others, (for_input, for_weight, for_bias) = node.args
    of_weight = [user for user in node.users if user.target is operator.getitem and user.args[1] != 0]
    if not for_input or not of_weight or len(of_weight) == len(node.users):
        return
    value = node.meta["val"]
    with node.graph.inserting_after(node):
        weight = node.graph.call_function(aten.convolution_backward.default, (*others, [False, for_weight, for_bias]))
    weight.meta = {**node.meta, "val": (None, *value[1:])}
    for user in of_weight:
        user.replace_input_with(node, weight)
    node.args = (*others, [True, False, False])
    node.meta["val"] = (value[0], None, None)


def _join_with_loss(node: Node) -> None:
    """Where the gradient of a log softmax comes from a loss over its rows, both are computed some rows at a time."""
    of_loss, log_probabilities, dim, _ = node.args
    if not isinstance(of_loss, Node) or of_loss.target is not aten.nll_loss_backward.default or len(of_loss.users) > 1:
        return
    value, made = log_probabilities.meta["val"], node.meta["val"]
    # (grad, log probabilities, target, weight, reduction, ignore_index, total_weight); without reduction there is a
    # gradient for each row.
    same = _undetached(of_loss.args[1]) is _undetached(log_probabilities)
    is_plain = value.dim() == 2 and value.is_contiguous() and made.dtype is value.dtype
    if not same or not is_plain or dim % 2 != 1 or of_loss.args[4] == 0:
        return
    node.target = torch.ops.remat.cross_entropy_backward.default
    node.args = (of_loss.args[0], log_probabilities, *of_loss.args[2:])
    node.graph.erase_node(of_loss)


def _keep_offsets(node: Node) -> None:
    """Where only its own backward reads a pool's indices, both become ops that keep offsets inside the window."""
    kept = [user for user in node.users if user.target is operator.getitem and user.args[1] == 1]
    readers = [reader for item in kept for reader in _readers(item)]
    if not readers or not all(_could_read_offsets(node, reader) for reader in readers):
        return
    input, *how = node.args
    pool, (output, indices) = Pool.of(*how), node.meta["val"]
    node.target, node.args = torch.ops.remat.max_pool2d.default, (input, *pool.args)
    with indices.fake_mode:
        node.meta["val"] = (output, torch.empty_like(output, dtype=torch.uint8))
    for item in kept:
        _set_value(item, node.meta["val"][1])
    for reader in readers:
        made = reader.meta["val"]
        reader.target = torch.ops.remat.max_pool2d_backward.default
        layout = shape_args(reader, made), stride_args(reader, made)
        reader.args = (reader.args[0], _undetached(reader.args[-1]), *layout, *pool.args)


def _could_read_offsets(node: Node, reader: Node) -> bool:
    """Whether `reader` is the backward of a pool that fits, where eager's kernels need no copy in another layout."""
    if reader.target is not aten.max_pool2d_with_indices_backward.default or node.kwargs or reader.kwargs:
        return False
    input, *how = node.args
    image, output = input.meta["val"], node.meta["val"][0]
    formats = (torch.contiguous_format, torch.channels_last)
    if image.dim() != 4 or not any(image.is_contiguous(memory_format=item) for item in formats):
        return False
    if reader.args[0].meta["val"].stride() != output.stride():
        return False
    return Pool.of(*how).fits_a_byte(image.shape[2:], output.shape[2:])


def _readers(node: Node) -> list[Node]:
    """Who reads a tensor, by itself or by another name."""
    found = []
    for user in node.users:
        found.extend(_readers(user) if user.target in _ALIASES else [user])
    return found


def _forward_nodes(graph: Graph, tangents: Sequence[Node]) -> set[Node]:
    """What comes before the first op that reads an incoming gradient."""
    found: set[Node] = set()
    for node in graph.nodes:
        if not set(tangents).isdisjoint(node.all_input_nodes):
            break
        found.add(node)
    return found


def _keep_mask(result: Node, forward: set[Node]) -> None:
    """Where backward reads the result of a ReLU only to know its sign, it is given a mask."""
    if result.target is not aten.relu.default or result not in forward:
        return
    readers = [reader for reader in _readers_of_storage(result) if reader not in forward]
    if not readers or not all(_could_read_mask(result, reader) for reader in readers):
        return
    value = result.meta["val"]
    with result.graph.inserting_after(result):
        mask = result.graph.call_function(torch.ops.remat.relu_mask.default, (result,))
    with value.fake_mode:
        mask.meta = {**result.meta, "val": torch.empty_like(value, dtype=torch.bool)}
    for reader in readers:
        reader.target, reader.args = torch.ops.remat.relu_backward.default, (reader.args[0], mask)


def _could_read_mask(result: Node, reader: Node) -> bool:
    if reader.target is not aten.threshold_backward.default or _undetached(reader.args[1]) is not result:
        return False
    value, grad, made = (item.meta["val"] for item in (result, reader.args[0], reader))
    is_alike = all(item.stride() == value.stride() and item.dtype is value.dtype for item in (grad, made))
    return value.dim() > 0 and is_alike and reader.args[2] == 0 and reader.args[0] is not result


def _readers_of_storage(node: Node) -> list[Node]:
    """Who reads a tensor, by itself or by a view."""
    address, found = storage_address(node.meta["val"]), []
    for user in node.users:
        value = user.meta.get("val")
        is_view = isinstance(value, torch.Tensor) and storage_address(value) == address
        found.extend(_readers_of_storage(user) if is_view else [user])
    return found


def _undetached(node: Any) -> Any:
    while isinstance(node, Node) and node.target in _ALIASES:
        node = node.args[0]
    return node


def _correct_statistics(node: Node) -> None:
    """Give mean and deviation the dtype that the kernel really returns."""
    input, *others = (item.meta["val"] for item in node.all_input_nodes)
    output, *statistics = node.meta["val"]
    if output.device.type != "cpu" or all(other.dtype is not torch.float32 for other in others):
        return
    with input.fake_mode:
        corrected = [torch.empty(item.shape, dtype=torch.float32) for item in statistics[:2]]
    node.meta["val"] = (output, *corrected, *statistics[2:])
    for user in node.users:
        if user.target is operator.getitem:
            _set_value(user, node.meta["val"][user.args[1]])


def _set_value(node: Node, value: torch.Tensor) -> None:
    """Change what `node` stands for, and what its aliases stand for."""
    node.meta["val"] = value
    for user in node.users:
        if user.target in _ALIASES:
            _set_value(user, value)
