"""Inputs whose sizes are left open while a graph is compiled."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from remat.inductor._compat.compiling import place_to_trace_in
from remat.inductor.shapes.open_inputs import OpenInputs, at_largest, at_sizes
from remat.pytorch._compat.symbols import is_open, symbols_of
from remat.pytorch.run.settings import SizesMatter


def captured(*inputs: torch.Tensor) -> tuple[GraphModule, list[object]]:
    """What Dynamo makes of a function whose first size is left open, and what it traced of the inputs."""
    found: list[GraphModule] = []

    def keep(module: GraphModule, _: object) -> GraphModule:
        found.append(module)
        return module

    torch._dynamo.reset()
    torch.compile(lambda *items: sum(item.sin().sum() for item in items), backend=keep, dynamic=True)(*inputs)
    return found[0], [node.meta["example_value"] for node in found[0].graph.find_nodes(op="placeholder")]


def test_stand_ins_are_of_the_largest_sizes_and_left_open() -> None:
    x = torch.ones(6, 4, requires_grad=True)
    module, traced = captured(x)
    symbols = symbols_of(traced)
    assert symbols is not None
    given = [value if isinstance(value, int) else x for value in (6, 4, x)][-len(traced) :]
    most = tuple(16 if hint == 6 else hint for hint in symbols.hints)
    opened = OpenInputs(tuple(traced), symbols, most)
    found, inside = opened.stand_ins(given, place_to_trace_in())
    assert inside.hints == most and is_open(found[-1])
    assert tuple(inside.number(size, most) for size in found[-1].shape) == (16, 4)
    assert found[-1].requires_grad and inside.may_be(most)
    assert opened.further_bytes(given) == 10 * 4 * 4
    assert [node.meta["example_value"].shape for node in at_sizes(module, given).graph.nodes if node.name == "sin"] == [
        torch.Size((6, 4))
    ]


def test_an_input_inside_of_another_tensor_is_not_left_open() -> None:
    x = torch.ones(8, 4)[2:]
    _, traced = captured(x)
    symbols = symbols_of(traced)
    if symbols is None:
        pytest.skip("this version of torch tells no size of a slice")
    values = [value for value in traced if isinstance(value, torch.Tensor)]
    if all(isinstance(value.storage_offset(), int) and not value.storage_offset() for value in values):
        pytest.skip("this version of torch traces slices as tensors of their own")
    given = [x if isinstance(value, torch.Tensor) else int(value) for value in traced]
    with pytest.raises(SizesMatter, match="in the middle of another tensor"):
        OpenInputs(tuple(traced), symbols, symbols.hints).stand_ins(given, place_to_trace_in())


def test_nodes_are_of_one_size_while_a_cut_is_chosen_only() -> None:
    seen: list[GraphModule] = []

    def keep(module: GraphModule, _: object) -> GraphModule:
        seen.append(module)
        return module

    torch._dynamo.reset()
    model = nn.Linear(4, 4)
    torch.compile(model, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), dynamic=True)(torch.ones(6, 4))
    graph = seen[0].graph
    before = {node: node.meta.get("val") for node in graph.nodes}
    symbols = symbols_of([node.meta["val"] for node in graph.find_nodes(op="placeholder")])
    assert symbols is not None and any(map(is_open, before.values()))
    with at_largest(graph, symbols):
        assert not any(is_open(node.meta.get("val")) for node in graph.nodes)
    assert all(node.meta.get("val") is before[node] for node in graph.nodes)


def test_without_symbols_nothing_changes() -> None:
    module = torch.fx.symbolic_trace(nn.ReLU())
    with at_largest(module.graph, None):
        assert not any("val" in node.meta for node in module.graph.nodes)
