"""Images keep the layout of the forward in its backward, without a copy before each convolution's gradient."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch._inductor import config
from torch.fx import Graph, GraphModule, Node

from remat.inductor.images import ImageLayout, as_laid_out, ask_for_gradients_channels_last, save_inputs_as_they_are

BATCH, CHANNELS, SIDE = 2, 3, 4
SHAPE = (BATCH, CHANNELS, SIDE, SIDE)


def backward(*, with_bias: bool) -> GraphModule:
    """Of a convolution whose incoming gradient is computed; that of a bias reads it, too."""
    graph = Graph()
    incoming, image, weight = (graph.placeholder(name) for name in ("incoming", "image", "weight"))
    gradient = graph.call_function(torch.ops.aten.mul.Tensor, (incoming, 2.0))
    gradient.meta["val"] = torch.empty(SHAPE)
    arguments = ([CHANNELS], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    results = [graph.call_function(torch.ops.aten.convolution_backward.default, (gradient, image, weight, *arguments))]
    if with_bias:
        results.append(graph.call_function(torch.ops.aten.sum.dim_IntList, (gradient, [0, 2, 3])))
    graph.output(tuple(results))
    return GraphModule({}, graph)


def named(module: GraphModule, target: object) -> list[Node]:
    return module.graph.find_nodes(op="call_function", target=target)


def test_gradient_with_several_readers_is_asked_for_channels_last() -> None:
    module = backward(with_bias=True)
    inputs = torch.randn(SHAPE), torch.randn(SHAPE), torch.randn(CHANNELS, CHANNELS, 3, 3)
    before = module(*inputs)
    ask_for_gradients_channels_last(module)
    (turned,) = named(module, torch.ops.aten.clone.default)
    assert turned.meta["val"].is_contiguous(memory_format=torch.channels_last)
    readers = {user.target for user in turned.users}
    assert readers == {torch.ops.aten.convolution_backward.default, torch.ops.aten.sum.dim_IntList}
    after = module(*inputs)
    torch.testing.assert_close(after[0][:2], before[0][:2])
    torch.testing.assert_close(after[1], before[1])


def test_gradient_that_nobody_else_reads_is_left_to_inductor() -> None:
    module = backward(with_bias=False)
    ask_for_gradients_channels_last(module)
    assert named(module, torch.ops.aten.clone.default) == []


@pytest.mark.parametrize(("device", "is_forced"), [("cuda", True), ("cpu", False)])
@pytest.mark.parametrize("is_laid_out", [True, False])
def test_backward_follows_the_forward_on_cuda_alone(
    device: str, is_forced: bool, is_laid_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remat.inductor.images.lays_out_images", lambda half: is_laid_out)
    images, forced = ImageLayout(torch.device(device)), []
    for is_backward in (False, True):
        with images.compiling(backward(with_bias=True), is_backward=is_backward):
            forced.append(config.force_layout_optimization)
    assert forced == [False, is_forced and is_laid_out]


def test_a_convolution_is_measured_with_channels_last() -> None:
    module = backward(with_bias=True)
    for node in module.graph.find_nodes(op="placeholder"):
        node.meta["val"] = torch.empty(CHANNELS, CHANNELS, 3, 3) if node.name == "weight" else torch.empty(SHAPE)
    (gradient,) = named(module, torch.ops.aten.convolution_backward.default)
    gradient.meta["val"] = (torch.empty(SHAPE), torch.empty(CHANNELS, CHANNELS, 3, 3), None)
    turned = as_laid_out(gradient)
    values = [item.meta["val"] for item in turned.all_input_nodes]
    assert len(values) == 3 and all(item.is_contiguous(memory_format=torch.channels_last) for item in values)
    assert (turned.target, turned.args[3:]) == (gradient.target, gradient.args[3:])
    (total,) = named(module, torch.ops.aten.sum.dim_IntList)
    assert as_laid_out(total) is total


def test_weights_that_are_only_cast_are_saved_as_they_are_and_images_laid_out() -> None:
    graph = Graph()
    image, weight, other = (graph.placeholder(name) for name in ("image", "weight", "other"))
    cast = graph.call_function(torch.ops.prims.convert_element_type.default, (weight, torch.float16))
    arguments = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    made = graph.call_function(torch.ops.aten.convolution.default, (image, cast, *arguments))
    output = graph.output((made, image, weight, cast, other))
    output.meta["user_visible_output_idxs"] = [0]
    save_inputs_as_they_are(GraphModule({}, graph))
    assert output.meta["user_visible_output_idxs"] == [0, 2, 4]
