"""Casts of gradients that nobody waits for come when backward is over."""

from __future__ import annotations

import pytest
import torch
from tests.support.joints import uncut_of
from torch import nn
from torch.fx import Graph, GraphModule, Node

from remat.inductor._compat.compiling import generates_matmuls
from remat.inductor.passes.late_casts import put_off_casts

CAST = torch.ops.prims.convert_element_type.default
aten = torch.ops.aten


class Layers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(8, 8) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float().square().mean()


class Hand:
    """A backward that is written by hand: its only result and what comes after that in the graph."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.tangent = self.made(self.graph.placeholder("tangents_1"), torch.bfloat16)

    def made(self, node: Node, dtype: torch.dtype) -> Node:
        node.meta["val"] = torch.empty(4, 4, device="meta", dtype=dtype)
        return node

    def call(self, op: object, *args: object, dtype: torch.dtype = torch.bfloat16) -> Node:
        return self.made(self.graph.call_function(op, args), dtype)  # type: ignore[arg-type]

    def after(self, *results: Node) -> list[str]:
        self.graph.output(results)
        module = GraphModule(nn.Module(), self.graph)
        put_off_casts(module, 0)
        module.graph.lint()
        return [node.name for node in module.graph.nodes if node.op == "call_function"]


def test_casts_of_all_weights_come_last() -> None:
    uncut = uncut_of(Layers(), torch.randn(4, 8))
    count = uncut.options["num_fwd_outputs"]
    put_off_casts(uncut.module, count)
    uncut.module.graph.lint()
    nodes = list(uncut.module.graph.nodes)
    last_product = max(place for place, node in enumerate(nodes) if node.target in (aten.mm.default,))
    results = uncut.module.graph.output_node().args[0]
    matrices = [item for item in results[count:] if isinstance(item, Node) and item.meta["val"].dim() == 2]
    assert len(matrices) >= 3 and all(nodes.index(item) > last_product for item in matrices)


def test_views_behind_a_cast_go_with_it() -> None:
    hand = Hand()
    product = hand.call(aten.mm.default, hand.tangent, hand.tangent)
    turned = hand.call(aten.t.default, product)
    cast = hand.call(CAST, turned, torch.float32, dtype=torch.float32)
    result = hand.call(aten.t.default, cast, dtype=torch.float32)
    other = hand.call(aten.mm.default, hand.tangent, hand.tangent)
    assert hand.after(result, other) == [item.name for item in (product, turned, other, cast, result)]


@pytest.mark.parametrize("case", ["read by another", "made by a fused kernel", "smaller"])
def test_cast_that_would_cost_something_stays(case: str) -> None:
    hand = Hand()
    op = aten.relu.default if case == "made by a fused kernel" else aten.mm.default
    wider = torch.bfloat16 if case == "smaller" else torch.float32
    made = hand.call(op, *[hand.tangent] * (1 if op is aten.relu.default else 2))
    made.meta["val"] = made.meta["val"].to(torch.float32) if case == "smaller" else made.meta["val"]
    cast = hand.call(CAST, made, wider, dtype=wider)
    after = hand.call(aten.mm.default, cast if case == "read by another" else hand.tangent, hand.tangent)
    names = hand.after(cast, after)
    assert names.index(cast.name) < names.index(after.name)


def test_matmuls_that_inductor_writes_are_asked_for() -> None:
    assert generates_matmuls({"max_autotune": True}) and not generates_matmuls({"max_autotune": False})
