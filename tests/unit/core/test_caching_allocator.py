"""What the allocator's rules add to a schedule, by the sizes that are asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.contract import graphs

from remat.core import plain_schedule
from remat.core.caching_allocator import GRAIN, HISTORY, SMALL
from remat.core.memory_rules import CPU, CUDA
from remat.core.problem import Problem


def of_size(size_bytes: int) -> Problem:
    problem = graphs.layered(0)
    count = len(problem.costs.size_bytes)
    costs = replace(problem.costs, size_bytes=(size_bytes,) * count, workspace_bytes=(0,) * len(problem.graph.ops))
    return replace(problem, costs=costs, resident_bytes=0)


@pytest.mark.parametrize("size", [GRAIN, 3 * GRAIN, SMALL])
def test_small_requests_get_what_they_ask_for(size: int) -> None:
    problem = of_size(size)
    assert CUDA.least_slack_bytes(problem) == 0
    assert CUDA.slack_bytes(problem, plain_schedule(problem.graph)) == 0


def test_larger_requests_may_get_a_larger_block() -> None:
    problem = of_size(SMALL + GRAIN)
    assert CUDA.least_slack_bytes(problem) == HISTORY
    assert CUDA.slack_bytes(problem, plain_schedule(problem.graph)) >= HISTORY
    assert CPU.slack_bytes(problem, plain_schedule(problem.graph)) == CPU.least_slack_bytes(problem) == 0
