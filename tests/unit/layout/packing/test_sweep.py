"""The answer for any number of buffers, and time limits that it lets every layout solver keep."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from remat.layout import LayoutProblem, load, place
from remat.layout.base import judge
from remat.layout.packing.sweep import sweep
from remat.layout.synthetic import random_lives
from remat.layout.validate import validate


@pytest.mark.parametrize("seed", range(20))
def test_offsets_overlap_nowhere(seed: int) -> None:
    problem = replace(random_lives(150, horizon=100, longest=5 + 4 * seed, seed=seed), capacity=None)
    aligned = tuple(
        replace(buffer, alignment=(1, 4, 6)[number % 3 * (seed % 2)]) for number, buffer in enumerate(problem.buffers)
    )
    problem = LayoutProblem(aligned)
    offsets = sweep(problem)
    validate(problem, judge(problem, offsets, "sweep", bound=0))
    assert max(at + buffer.size for at, buffer in zip(offsets, aligned, strict=True)) <= 2 * load(problem)


def test_no_buffers_need_no_offsets() -> None:
    assert sweep(LayoutProblem(())) == []


@pytest.mark.parametrize("solver", ["auto", "exact", "local_search", "size", "best_fit", "load"])
def test_many_buffers_are_placed_at_the_time_limit(solver: str) -> None:
    problem = replace(random_lives(30_000, horizon=30_000, longest=300), capacity=None)
    start = time.process_time()
    placement = place(problem, solver, time_limit_s=0.5)
    # Of the processor alone: the machine may have other things to do.
    assert time.process_time() - start < 4.0
    assert placement.height < 1.3 * load(problem)
