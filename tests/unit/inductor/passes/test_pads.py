"""What is padded twice, once turned round, is padded once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from remat.inductor.passes.pads import pad_once

PAD, PERMUTE = torch.ops.aten.constant_pad_nd.default, torch.ops.aten.permute.default


def padded(readers: list[tuple[tuple[int, ...], list[int], float]], source: Tensor) -> GraphModule:
    """Each reader takes the source in an order of dimensions and pads it."""
    graph = Graph()

    def made(node: Node, value: Tensor) -> Node:
        node.meta["val"] = value
        return node

    given_ = made(graph.placeholder("source"), source.to("meta"))
    results = []
    for order, pads, value in readers:
        turned = given_
        if order != tuple(range(len(order))):
            turned = made(graph.call_function(PERMUTE, (given_, list(order))), given_.meta["val"].permute(order))
        pad = graph.call_function(PAD, (turned, pads, value))
        results.append(made(pad, torch.constant_pad_nd(turned.meta["val"], pads, value)))
    graph.output(tuple(results))
    return GraphModule(nn.Module(), graph)


def pads_in(module: GraphModule) -> int:
    return len(module.graph.find_nodes(op="call_function", target=PAD))


def test_gradient_that_two_matmuls_read_is_padded_once() -> None:
    source = torch.randn(6, 5)
    module = padded([((1, 0), [0, 0, 0, 3], 0.0), ((0, 1), [0, 3], 0.0)], source)
    expected = module(source)
    pad_once(module)
    module.graph.lint()
    assert pads_in(module) == 1
    assert all(torch.equal(now, before) for now, before in zip(module(source), expected, strict=True))


@pytest.mark.parametrize("other", [((0, 1), [0, 2], 0.0), ((0, 1), [0, 3], 1.0), ((1, 0), [0, 3], 0.0)])
def test_what_is_padded_otherwise_stays(other: tuple[tuple[int, ...], list[int], float]) -> None:
    module = padded([((1, 0), [0, 0, 0, 3], 0.0), other], torch.randn(6, 5))
    pad_once(module)
    assert pads_in(module) == 2


orders = st.permutations([0, 1, 2]).map(tuple)
pads = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(
    lambda sizes: [side for size in sizes for side in (0, size)]
)


@settings(deadline=None)
@given(st.lists(st.tuples(orders, pads, st.sampled_from([0.0, 1.0])), min_size=1, max_size=4))
def test_results_stay_the_same(readers: list[tuple[tuple[int, ...], list[int], float]]) -> None:
    source = torch.randn(2, 3, 4)
    module = padded(readers, source)
    expected, before = module(source), pads_in(module)
    pad_once(module)
    module.graph.lint()
    assert pads_in(module) <= before
    for now, was in zip(module(source), expected, strict=True):
        assert torch.equal(now, was)
    for node, was in zip(module.graph.output_node().args[0], expected, strict=True):
        assert node.meta["val"].shape == was.shape
