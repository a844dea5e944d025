"""Two gradients of a convolution in one call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import remat
from remat import zoo
from remat.core.graph import OpId
from remat.core.problem import Problem
from remat.core.schedule import plain_schedule
from remat.core.simulate import simulate
from remat.pytorch.costs.allocations import extra_bytes_of_calls
from remat.pytorch.run import join


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.convolutions:
            x = layer(x).tanh()
        return x.square().mean()


@pytest.mark.parametrize("budget", ["1x", "0.7x"])
def test_joined_gradients_have_the_same_bits_and_the_peak_stays(budget: str, monkeypatch) -> None:
    found: list[frozenset[OpId]] = []

    def watched(*args: object) -> frozenset[OpId]:
        found.append(join_ops(*args))
        return found[-1]

    join_ops = join.joined_ops
    monkeypatch.setattr(join, "joined_ops", watched)
    example = zoo.build("unet")
    step = remat.optimize(example.model, budget, time_limit=2, progress=False)
    assert remat.verify(example.model, step, *example.args, **example.kwargs).ok
    assert found[-1], "somewhere there is memory for both"

    def run() -> None:
        step(*example.args, **example.kwargs).backward()
        example.model.zero_grad()

    assert remat.measure(run).peak_bytes == remat.plan_of(step).predicted_peak


def test_they_stay_apart_where_both_would_be_the_peak(monkeypatch) -> None:
    """A pair is joined exactly where its bound is within the peak."""
    seen: list[tuple[Problem, dict]] = []
    join_ops = join.joined_ops

    def watched(problem: Problem, schedule, nodes) -> frozenset[OpId]:
        seen.append((problem, nodes))
        return join_ops(problem, schedule, nodes)

    monkeypatch.setattr(join, "joined_ops", watched)
    model, x = Net(), torch.randn(4, 8, 16, 16, requires_grad=True)
    remat.optimize(model, "1x", progress=False)(x)
    problem, nodes = seen[-1]
    schedule = plain_schedule(problem.graph)
    pairs = [
        place
        for place, (first, second) in enumerate(zip(schedule.steps, schedule.steps[1:], strict=False))
        if join._are_gradients_of_one(nodes.get(first), nodes.get(second))
    ]
    assert len(pairs) == 6
    # What a convolution works in is the machine's affair; here one gradient alone needs nothing.
    problem = replace(problem, costs=replace(problem.costs, workspace_bytes=(0,) * len(problem.graph.ops)))
    timeline = simulate(problem, schedule)
    sizes = problem.costs.size_bytes
    room = {}
    for place in pairs:
        first, second = schedule.steps[place : place + 2]
        made = sum(sizes[value] for value in problem.graph.ops[second].outputs)
        room[first] = timeline.peak_bytes - timeline.live_bytes[place] - made
    assert len(set(room.values())) > 1
    for work in (0, *room.values(), max(room.values()) + 1):
        joined = join_ops(problem, schedule, nodes, lambda *_, work=work: work)
        assert joined == {first for first, bytes_left in room.items() if work <= bytes_left}


CONVOLUTIONS = (
    ((16, 16, 96, 96), (16, 16, 3, 3), 1, 1, False),
    ((16, 32, 48, 48), (16, 32, 3, 3), 1, 1, False),
    ((8, 64, 32, 32), (128, 64, 3, 3), 2, 1, False),
    ((8, 64, 16, 16), (256, 64, 1, 1), 1, 1, False),
    ((8, 32, 24, 24), (32, 1, 3, 3), 1, 32, False),
    ((8, 32, 24, 24), (32, 16, 2, 2), 2, 1, True),
    ((1, 3, 64, 64), (8, 3, 7, 7), 2, 1, False),
)


@pytest.mark.parametrize(
    ("images", "weight", "stride", "groups", "transposed", "dtype"),
    [
        *((*case, torch.float32) for case in CONVOLUTIONS),
        # The large ones take a CPU without kernels for half precision long.
        *(pytest.param(*case, torch.bfloat16, marks=pytest.mark.long) for case in CONVOLUTIONS[:3]),
        *((*case, torch.bfloat16) for case in CONVOLUTIONS[3:]),
    ],
)
def test_what_one_call_works_in_is_known(images, weight, stride, groups, transposed, dtype) -> None:
    """Some kernels work in more for both gradients than the greedier of the two alone."""
    x, w = torch.randn(images, dtype=dtype), torch.randn(weight, dtype=dtype)
    how = ([stride] * 2, [0 if weight[-1] < 3 else weight[-1] // 2] * 2, [1, 1], transposed, [0, 0], groups)
    grad = torch.randn_like(torch.ops.aten.convolution(x, w, None, *how))

    def call() -> list[torch.Tensor]:
        made = torch.ops.aten.convolution_backward(grad, x, w, None, *how, [True, True, False])
        return [item for item in made if item is not None]

    graph = torch.fx.Graph()
    inputs = [graph.placeholder(f"input_{number}") for number in range(3)]
    for node, tensor in zip(inputs, (grad, x, w), strict=True):
        node.meta["val"] = tensor
    masks = ([True, False, False], [False, True, False])
    apart = [graph.call_function(join.CONVOLUTION_BACKWARD, (*inputs, None, *how, mask)) for mask in masks]
    for node, tensor in zip(apart, (x, w), strict=True):
        node.meta["val"] = [torch.empty_like(tensor)]

    made = call()
    assert join.measured_work(*apart) == extra_bytes_of_calls(call, x.device) - sum(item.nbytes for item in made)


def test_only_gradients_of_one_convolution_are_joined() -> None:
    graph = torch.fx.Graph()
    g, x, w = (graph.placeholder(name) for name in "gxw")
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    def call(*args: object) -> torch.fx.Node:
        return graph.call_function(join.CONVOLUTION_BACKWARD, args)

    of_input = call(g, x, w, None, *rest, [True, False, False])
    of_weight = call(g, x, w, None, *rest, [False, True, True])
    of_other = call(x, g, w, None, *rest, [False, True, True])
    assert join._are_gradients_of_one(of_input, of_weight)
    assert not join._are_gradients_of_one(of_input, of_other)
    assert not join._are_gradients_of_one(of_input, None)
    assert join.joined_args(of_input, of_weight)[-1] == [True, True, True]
