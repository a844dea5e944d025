"""Lifetimes of a schedule: half-open, one buffer for each version, and their load is the simulated peak."""

from __future__ import annotations

from dataclasses import replace

from remat.core import Costs, Graph, Op, OpId, Problem, Schedule, ValueId, simulate
from remat.layout import LayoutProblem, lifetimes, load


def chain() -> Problem:
    """Values 0 → 1 → 2, and op 3 reads 0 and 2; op 1 needs a workspace, value 2 is empty."""
    reads = [(), (0,), (1,), (0, 2)]
    ops = tuple(Op(f"op{i}", tuple(map(ValueId, read)), (ValueId(i),)) for i, read in enumerate(reads))
    graph = Graph(ops, 4, (ValueId(3),))
    return Problem(graph, Costs((1.0,) * 4, (0, 7, 0, 0), (10, 20, 0, 40)), 10**6, resident_bytes=5)


def schedule(*steps: int) -> Schedule:
    return Schedule(tuple(map(OpId, steps)))


def test_values_live_from_their_step_to_the_end_of_their_last_use() -> None:
    lives = {
        buffer.id: (buffer.lower, buffer.upper, buffer.size) for buffer in lifetimes(chain(), schedule(0, 1, 2, 3))
    }
    assert lives == {"0:v0": (0, 4, 10), "1:v1": (1, 3, 20), "1:workspace": (1, 2, 7), "3:v3": (3, 4, 40)}


def test_recomputed_value_is_a_buffer_of_its_own() -> None:
    lives = {buffer.id: (buffer.lower, buffer.upper) for buffer in lifetimes(chain(), schedule(0, 1, 2, 0, 3))}
    assert (lives["0:v0"], lives["3:v0"]) == ((0, 2), (3, 5))


def test_load_is_the_simulated_peak_less_what_is_resident() -> None:
    problem, steps = chain(), schedule(0, 1, 2, 3)
    assert load(LayoutProblem(lifetimes(problem, steps))) == simulate(problem, steps).peak_bytes - 5


def test_buffers_are_whole_blocks() -> None:
    buffers = lifetimes(chain(), schedule(0, 1, 2, 3), block_bytes=16)
    assert [(buffer.size, buffer.alignment) for buffer in buffers] == [(16, 16), (32, 16), (16, 16), (48, 16)]


def test_output_written_into_an_input_goes_on_in_its_buffer() -> None:
    reads = [(), (0,), (1,)]
    ops = [Op(f"op{i}", tuple(map(ValueId, read)), (ValueId(i),)) for i, read in enumerate(reads)]
    ops[1] = replace(ops[1], overwrites=(ValueId(0),))
    problem = Problem(Graph(tuple(ops), 3, (ValueId(2),)), Costs((1.0,) * 3, (0,) * 3, (10, 10, 5)), 10**6)
    found = lifetimes(problem, schedule(0, 1, 2))
    assert [(buffer.id, buffer.lower, buffer.upper) for buffer in found] == [("0:v0", 0, 3), ("2:v2", 2, 3)]
    assert load(LayoutProblem(found)) == simulate(problem, schedule(0, 1, 2)).peak_bytes == 15
