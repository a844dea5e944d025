"""What the allocator's rules add to a schedule, by the sizes that are asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.contract import graphs

from remat.core import plain_schedule
from remat.core.caching_allocator import GRAIN, HISTORY, MOST_HISTORY, SMALL, history_bytes
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
    least = CUDA.least_slack_bytes(problem)
    assert HISTORY < least <= MOST_HISTORY
    assert CUDA.slack_bytes(problem, plain_schedule(problem.graph)) >= least
    assert CPU.slack_bytes(problem, plain_schedule(problem.graph)) == CPU.least_slack_bytes(problem) == 0


def test_many_requests_may_get_more() -> None:
    assert history_bytes([SMALL] * 1000) == 0
    assert history_bytes([2 * SMALL] * 10) < history_bytes([2 * SMALL] * 100) < MOST_HISTORY
    assert history_bytes([2 * SMALL] * 10_000) == MOST_HISTORY
