"""Images where convolutions like them: channels last in both halves, if Inductor lays them out so in the forward.

Inductor decides for each half by the convolutions that this runs. Most backwards run none, only gradients of
convolutions: what the forward has saved with channels last, and the gradients that come in, would be turned round
before each of them, in every step. Inputs that a forward only casts for its convolutions, as weights, would be saved as
copies of their own width, laid out anew, although the inputs themselves stay in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from remat.inductor._compat.compiling import compile_settings, lays_out_images

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


class ImageLayout:
    """What was decided for the forward is kept for its backward."""

    def __init__(self, device: torch.device) -> None:
        # On the CPU the gradients of convolutions need several times the memory in that layout.
        self._is_possible = device.type == "cuda"
        self._is_wanted = False

    @contextlib.contextmanager
    def compiling(self, half: GraphModule, *, is_backward: bool) -> Iterator[None]:
        """Inductor's settings for a half; the forward comes first."""
        if not is_backward:
            self._is_wanted = self._is_possible and lays_out_images(half.graph)
            if self._is_wanted:
                save_inputs_as_they_are(half)
        settings = {"force_layout_optimization": True} if self._is_wanted and is_backward else {}
        if settings:
            ask_for_gradients_channels_last(half)
        with compile_settings(settings):
            yield


def laid_out(nodes: Sequence[Node], device: torch.device) -> Sequence[Node]:
    """Nodes of a graph as they will run where Inductor lays out its images: to be measured, not to be compiled."""
    is_wanted = device.type == "cuda" and bool(nodes) and lays_out_images(nodes[0].graph)
    return [as_laid_out(node) for node in nodes] if is_wanted else nodes


def as_laid_out(node: Node) -> Node:
    """The same convolution, or gradient of one, of images with channels last; other nodes are left as they are."""
    if node.target not in _CONVOLUTIONS:
        return node
    graph = Graph()

    def given(item: Node) -> Node:
        value = item.meta.get("val")
        made = graph.placeholder(item.name)
        is_image = isinstance(value, torch.Tensor) and value.dim() in _FORMATS
        made.meta["val"] = value.contiguous(memory_format=_FORMATS[value.dim()]) if is_image else value
        return made

    args, kwargs = map_arg((node.args, node.kwargs), given)
    made = graph.call_function(node.target, args, kwargs)
    made.meta = dict(node.meta)
    return made


def save_inputs_as_they_are(forward: GraphModule) -> None:
    """Inductor keeps the layout of what a caller sees: here also of inputs that are saved, but for those that
    convolutions read themselves, which their gradients want laid out.
    """
    (output,) = forward.graph.find_nodes(op="output")
    kept = {
        place
        for place, node in enumerate(output.args[0])
        if isinstance(node, Node)
        and node.op == "placeholder"
        and not any(user.target is torch.ops.aten.convolution.default for user in node.users)
    }
    output.meta["user_visible_output_idxs"] = sorted(kept.union(output.meta.get("user_visible_output_idxs", ())))


def ask_for_gradients_channels_last(backward: GraphModule) -> None:
    """Inductor lays out what a convolution's gradient and others read by the strides that it finds for it: a copy says
    which. Where these are the strides already it drops the copy.
    """
    for node in backward.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default):
        gradient: Any = node.args[0]
        value = gradient.meta.get("val") if isinstance(gradient, Node) and gradient.op == "call_function" else None
        if isinstance(value, torch.Tensor) and value.dim() in _FORMATS and len(gradient.users) > 1:
            layout = {"memory_format": _FORMATS[value.dim()]}
            with backward.graph.inserting_after(gradient):
                turned = backward.graph.call_function(torch.ops.aten.clone.default, (gradient,), layout)
            turned.meta = {**gradient.meta, "val": torch.ops.aten.clone.default(value, **layout)}
            gradient.replace_all_uses_with(turned, delete_user_cb=lambda user, turned=turned: user is not turned)
    backward.recompile()
