"""What a step takes without sharing, at its peak and in an arena: the figures agree with each other."""

from __future__ import annotations

from dataclasses import replace

from tests.support.reports import measured

from remat.core import Fingerprint, Plan, Problem, Solution, Status, plain_schedule
from remat.core.results.profile import BEFORE, MemoryClass, ProfiledStorage, StepProfile
from remat.core.results.replay import replay_plain
from remat.layout.examples import exp_of_sum, two_layer_mlp
from remat.layout.footprint import footprint


def step_of(problem: Problem) -> StepProfile:
    solution = Solution(Status.OPTIMAL, plain_schedule(problem.graph), 0.0, 0, 0.0, 0, "none")
    return replay_plain(Plan(problem, solution, Fingerprint((), "", "cpu", ()), 0))


def test_the_two_layer_mlp_takes_what_its_sharing_takes() -> None:
    found = footprint(step_of(two_layer_mlp()))
    assert (found.total_bytes, found.peak_bytes) == (168_260, 102_468)
    assert (found.arena_bytes, found.in_place_arena_bytes) == (102_468, 77_892)
    assert found.written_over_bytes == 32_768 + 8_192 + 32_768
    assert (found.sharing_bytes, found.in_place_bytes) == (168_260 - 102_468, 102_468 - 77_892)


def test_exp_of_sum_takes_one_buffer_in_place() -> None:
    found = footprint(step_of(exp_of_sum(64)))
    assert (found.total_bytes, found.arena_bytes, found.in_place_arena_bytes) == (192, 128, 64)


def test_resident_memory_and_workspace_are_counted() -> None:
    step = measured()
    found = footprint(step)
    workspace = sum(op.workspace_bytes for op in step.ops)
    assert found.total_bytes == workspace + sum(item.size_bytes for item in step.storages)
    assert step.peak_bytes == found.peak_bytes <= found.arena_bytes <= found.total_bytes
    assert found.in_place_arena_bytes <= found.arena_bytes


def test_reserved_is_unknown_without_a_caching_allocator() -> None:
    assert footprint(measured()).reserved_bytes is None
    assert footprint(replace(measured(), reserved_bytes=77)).reserved_bytes == 77


def test_an_arena_that_is_known_is_not_looked_for_again() -> None:
    assert footprint(measured(), 10**9).arena_bytes == 10**9


def test_a_step_without_ops_holds_what_was_there() -> None:
    resident = ProfiledStorage(MemoryClass.PARAMETER, 64, "weight", "", BEFORE, 0)
    gone = ProfiledStorage(MemoryClass.INPUT, 32, "", "", BEFORE, BEFORE)
    found = footprint(StepProfile("", "cpu", "", (), (resident, gone), 64, 0.0))
    assert (found.total_bytes, found.arena_bytes, found.in_place_bytes) == (64, 64, 0)
