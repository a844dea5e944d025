"""A problem whose ops may write into an input that nothing reads later, as a solver sees it that knows nothing of this.

In: a problem with `Op.overwrites`. Out: the problem as if every op that may overwrite did so: the output then takes the
input's place while the op runs, which is a workspace smaller by the output. That is a relaxation, so what is proven
there holds. Mostly a schedule does as supposed; where a recomputation reads an input once more after it should have
been overwritten, it needs more. `overwriting` is what deals with that.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from remat.core.eager import without_overwrites
from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.simulate import NO_VALUE, simulate


def has_overwrites(problem: Problem) -> bool:
    return any(op.overwrites for op in problem.graph.ops)


def always_overwritten(problem: Problem, but: Collection[int] = ()) -> Problem:
    """The problem as if every op that may overwrite an input did so in every schedule: never harder than it is.

    The ops `but` never do; with them, it may be harder.
    """
    if not has_overwrites(problem):
        return problem
    costs, never = problem.costs, set(but)
    workspace = tuple(
        need - costs.size_bytes[op.outputs[0]] if op.overwrites and number not in never else need
        for number, (op, need) in enumerate(zip(problem.graph.ops, costs.workspace_bytes, strict=True))
    )
    plain = without_overwrites(problem)
    return replace(plain, costs=replace(costs, workspace_bytes=workspace))


def kept_from_overwriting(problem: Problem, schedule: Schedule) -> frozenset[int]:
    """The ops that may overwrite an input and, in one of their runs in `schedule`, cannot: it is read later."""
    taken = simulate(problem, schedule).overwritten
    runs = zip(schedule.steps, taken, strict=True)
    return frozenset(number for number, value in runs if value == NO_VALUE and problem.graph.ops[number].overwrites)
