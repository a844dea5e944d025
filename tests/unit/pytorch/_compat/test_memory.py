"""The profiler of allocations, beside the named ranges that others open."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

import remat
from remat.pytorch._compat.memory import AllocationProfiler, cpu_allocation_events, cpu_events, op_range


def test_allocations_and_own_ranges_are_seen_and_those_of_others_are_not() -> None:
    profiler = AllocationProfiler()
    with profiler, torch.autograd.profiler.record_function("theirs"):
        with op_range("ours"):
            kept = torch.empty(1000)
        del kept
    roots = profiler.take_events()
    assert [event.name for event in roots if event.name in ("ours", "theirs")] == ["ours"]


def test_ranges_and_marks_stand_in_order_among_the_allocations() -> None:
    def work() -> None:
        with op_range("ours"):
            torch.empty(1000)

    with AllocationProfiler() as profiler:
        work()
    events = cpu_events(profiler, "ours")
    [(start, end)] = events.ranges
    assert [size for moment, _, size in events.allocations if start <= moment <= end] == [4000, -4000]
    with AllocationProfiler() as profiler:
        work()
        torch.empty(10)
    assert [size for _, size in cpu_allocation_events(profiler, "ours")] == [0, 4000, -4000, 40, -40]


OUTLIVED = """
import torch
from remat.pytorch._compat.memory import AllocationProfiler

x = torch.ones(64, 64)

def work(times):
    for _ in range(times):
        (x @ x).relu_().sum()

for _ in range(10):
    first, second = AllocationProfiler(), AllocationProfiler()
    first.start()
    with torch.autograd.profiler.record_function("outlives the first"):
        work(300)
        first.stop()
        first.take_events()
        second.start()
    work(1500)
    second.stop()
    second.take_events()
print("whole")
"""


def test_range_that_outlives_a_profiler_leaves_the_next_one_whole() -> None:
    # With torch.profiler.profile in its place, most runs of this end in a segmentation fault.
    sources = str(Path(remat.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-c", OUTLIVED],
        env={**os.environ, "PYTHONPATH": sources},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (result.returncode, result.stdout) == (0, "whole\n"), result.stderr
