"""Two gradients of a convolution in one call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import remat
from remat import zoo
from remat.core.graph import OpId
from remat.core.problem import Problem
from remat.core.schedule import plain_schedule
from remat.core.simulate import simulate
from remat.pytorch import join


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
    timeline = simulate(problem, schedule)
    assert 0 < len(join_ops(problem, schedule, nodes)) < len(pairs)
    for place in pairs:
        first, second = schedule.steps[place : place + 2]
        made = sum(problem.costs.size_bytes[value] for value in problem.graph.ops[second].outputs)
        bound = timeline.live_bytes[place] + made + problem.costs.workspace_bytes[second]
        assert (first in join_ops(problem, schedule, nodes)) == (bound <= timeline.peak_bytes)


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
