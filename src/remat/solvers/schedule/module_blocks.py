"""Per-block checkpointing as people write it: `torch.utils.checkpoint` around each repeated block of the model.

In: a problem whose ops know their modules, and the names of the blocks, as `layers.3`. Out: the schedule that keeps
what goes from one block to the next and everything outside them. The rest of a block is computed again, all of it at
once, when backward first reads any of it: that is what the library call does, where `full` brings each value back just
in time and finds its blocks in the graph.
"""

from __future__ import annotations

from collections.abc import Collection

from remat.core.eager import as_eager
from remat.core.graph import OpId
from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.simulate import simulate
from remat.solvers.schedule.keep import first_backward


def block_schedule(problem: Problem, blocks: Collection[str]) -> Schedule:
    """The schedule with every block checkpointed; the plain one where no op belongs to a block."""
    ops, forward = problem.graph.ops, first_backward(problem)
    dropped = dropped_values(problem, blocks)
    needed = _needed(problem, dropped)
    again: dict[str, list[OpId]] = {}
    for number in needed:
        value = next(value for value in ops[number].outputs if value in dropped)
        again.setdefault(dropped[value], []).append(OpId(number))
    steps = [OpId(number) for number in range(forward)]
    for number in range(forward, len(ops)):
        missing = dict.fromkeys(dropped[value] for value in ops[number].inputs if value in dropped)
        for block in missing:
            steps += again.pop(block, [])
        steps.append(OpId(number))
    return Schedule(tuple(steps))


def blocks_peak_bytes(problem: Problem, schedule: Schedule, blocks: Collection[str], state_bytes: int) -> int:
    """The peak of a `block_schedule`, with the generator's state that each block keeps until its backward is over.

    While a block runs again, the state from before is kept too. The blocks run as eager PyTorch runs them.
    """
    problem = as_eager(problem)
    ops, forward, names = problem.graph.ops, first_backward(problem), frozenset(blocks)
    dropped = dropped_values(problem, blocks)
    until: dict[str, int] = {}
    for step, number in enumerate(schedule.steps):
        until.update((dropped[value], step) for value in ops[number].inputs if value in dropped)
    started: set[str] = set()
    peak = 0
    for step, (number, live) in enumerate(zip(schedule.steps, simulate(problem, schedule).live_bytes, strict=True)):
        started.add(_block_of(ops[number].module, names) if number < forward else "")
        again = number < forward <= step
        kept = sum(until.get(block, -1) >= step for block in started)
        peak = max(peak, live + state_bytes * (kept + again))
    return peak


def dropped_values(problem: Problem, blocks: Collection[str]) -> dict[int, str]:
    """The values that die with their block's forward, and the block of each."""
    names = frozenset(blocks)
    home: dict[int, str] = {}
    kept = set(problem.graph.outputs)
    for op in problem.graph.ops[: first_backward(problem)]:
        block = _block_of(op.module, names)
        kept.update(value for value in op.inputs if home.get(value, "") != block)
        home.update((value, block) for value in op.outputs)
        if not op.recomputable:
            kept.update(op.outputs)
    return {value: block for value, block in home.items() if block and value not in kept}


def _needed(problem: Problem, dropped: Collection[int]) -> list[int]:
    """Forward ops, in order, that make what backward reads of the dropped values, or lead there within them."""
    ops, forward = problem.graph.ops, first_backward(problem)
    wanted = {value for op in ops[forward:] for value in op.inputs if value in dropped}
    found: list[int] = []
    for number in reversed(range(forward)):
        if wanted.intersection(ops[number].outputs):
            found.append(number)
            wanted.update(value for value in ops[number].inputs if value in dropped)
    return found[::-1]


def _block_of(module: str, blocks: frozenset[str]) -> str:
    """The block that the module is or lies in; empty where it lies in none."""
    pieces = module.split(".")
    paths = (".".join(pieces[:length]) for length in range(1, len(pieces) + 1))
    return next((path for path in paths if path in blocks), "")
