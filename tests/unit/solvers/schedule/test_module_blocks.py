"""Per-block checkpointing on a graph: blocks keep their inputs and run again whole, what lies outside stays."""

from __future__ import annotations

from remat.core.graph import Graph, Op, ValueId
from remat.core.problem import Costs, Problem
from remat.core.validate import validate
from remat.solvers.schedule.module_blocks import block_schedule, blocks_peak_bytes, dropped_values


def training(blocks: int) -> Problem:
    """`stem`, then blocks of two ops each, then backward in reverse, which reads every forward value."""
    forward = [Op("stem", (), (ValueId(0),), module="stem")]
    for number in range(1, 2 * blocks + 1):
        module = f"layers.{(number - 1) // 2}.part"
        forward.append(Op(f"f{number}", (ValueId(number - 1),), (ValueId(number),), module=module))
    count = len(forward)
    backward = [
        Op(f"b{number}", (ValueId(number), *([ValueId(2 * count - 2 - number)] if number < count - 1 else [])),
           (ValueId(2 * count - 1 - number),), backward=True)
        for number in reversed(range(count))
    ]  # fmt: skip
    graph = Graph((*forward, *backward), 2 * count, (ValueId(2 * count - 1),))
    return Problem(graph, Costs((1.0,) * (2 * count), (0,) * (2 * count), (10,) * (2 * count)), 10**6)


def test_inside_of_blocks_is_dropped_and_their_inputs_stay() -> None:
    problem = training(3)
    assert dropped_values(problem, ["layers.0", "layers.1", "layers.2"]) == {
        1: "layers.0",
        3: "layers.1",
        5: "layers.2",
        6: "layers.2",
    }


def test_each_block_runs_again_once_and_the_schedule_is_valid() -> None:
    problem = training(3)
    schedule = block_schedule(problem, ["layers.0", "layers.1", "layers.2"])
    assert validate(problem, schedule) <= problem.budget_bytes
    assert schedule.recomputed() == {1: 1, 3: 1, 5: 1, 6: 1}


def test_nothing_runs_again_without_blocks() -> None:
    problem = training(2)
    assert block_schedule(problem, []).steps == tuple(range(len(problem.graph.ops)))
    assert block_schedule(problem, ["other"]).steps == tuple(range(len(problem.graph.ops)))


def test_name_that_only_begins_like_a_block_is_outside() -> None:
    problem = training(2)
    assert dropped_values(problem, ["layers"]).keys() == {1, 2, 3, 4}
    assert dropped_values(problem, ["layer"]) == {}


def test_generator_states_count_until_the_backward_of_their_block_is_over() -> None:
    problem = training(3)
    blocks = ["layers.0", "layers.1", "layers.2"]
    schedule = block_schedule(problem, blocks)
    bare = blocks_peak_bytes(problem, schedule, blocks, 0)
    assert bare == validate(problem, schedule)
    # Most while the last block runs again: three states, one from before, and values 0, 2, 4, 5 and 6.
    assert blocks_peak_bytes(problem, schedule, blocks, 1000) == 4000 + 50
