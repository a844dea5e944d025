"""Sums whose terms come one after another are added up as they come."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

import remat
from remat.inductor.model.program import FAR_APART
from remat.inductor.passes import settle
from remat.inductor.passes.settle import LEAST_BYTES, SETTLED, settle_sums

WIDTH = 512
SUM = torch.ops.aten.add.Tensor


class Backward:
    """A backward that is written by hand."""

    def __init__(self, width: int = WIDTH) -> None:
        self.graph = Graph()
        self.width = width
        self.tangent = self._made(self.graph.placeholder("tangents_1"))

    def _made(self, node: Node) -> Node:
        node.meta["val"] = torch.empty(self.width, self.width, device="meta")
        return node

    def call(self, op: Callable[..., object], *args: object) -> Node:
        return self._made(self.graph.call_function(op, args))

    def kernels(self, count: int) -> Node:
        node = self.tangent
        for _ in range(count):
            node = self.call(torch.ops.aten.mm.default, node, self.tangent)
        return node

    def settled(self, *outputs: Node) -> int:
        self.graph.output(outputs)
        module = GraphModule(nn.Module(), self.graph)
        settle_sums(module)
        module.graph.lint()
        return len(module.graph.find_nodes(op="call_function", target=SETTLED))


def test_sum_that_waits_is_settled() -> None:
    made = Backward()
    first = made.call(SUM, made.kernels(1), made.kernels(1))
    second = made.call(SUM, first, made.kernels(FAR_APART))
    assert made.settled(second) == 1


def test_sum_that_is_read_soon_is_left_alone() -> None:
    made = Backward()
    first = made.call(SUM, made.kernels(1), made.kernels(1))
    assert made.settled(made.call(SUM, first, made.kernels(FAR_APART - 1))) == 0


def test_sum_of_what_others_read_is_left_alone() -> None:
    made = Backward()
    term = made.kernels(1)
    first = made.call(SUM, term, made.kernels(1))
    assert made.settled(made.call(SUM, first, made.kernels(FAR_APART)), term) == 0


def test_small_sum_is_left_alone() -> None:
    width = int((LEAST_BYTES / 4) ** 0.5) - 1
    made = Backward(width)
    first = made.call(SUM, made.kernels(1), made.kernels(1))
    assert made.settled(made.call(SUM, first, made.kernels(FAR_APART))) == 0


class ReadByAll(nn.Module):
    """Every layer reads what the first one made, which is longer, as those of a decoder read the encoder's."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)) for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.tanh(self.first(x))
        x = x[:, :8]
        for key, *others in self.layers:
            x = torch.tanh(x + key(made).mean(1, keepdim=True))
            for other in others:
                x = torch.tanh(other(x))
        return x.square().mean()


@pytest.mark.long
@pytest.mark.slow
def test_compiled_step_needs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    needed, gradients = {}, {}
    x = torch.randn(16, WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
    for far in (FAR_APART, 10**9):
        monkeypatch.setattr(settle, "FAR_APART", far)
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = ReadByAll()
        step = remat.optimize(model, "10GiB", compiler="inductor", progress=False)
        step(x).backward()
        needed[far] = remat.plan_of(step).predicted_peak
        gradients[far] = [parameter.grad for parameter in model.parameters()]
    assert needed[FAR_APART] < 0.95 * needed[10**9]
    torch.manual_seed(0)
    plain = ReadByAll()
    plain(x).backward()
    for found in gradients.values():
        torch.testing.assert_close(found, [parameter.grad for parameter in plain.parameters()], rtol=1e-4, atol=1e-6)
