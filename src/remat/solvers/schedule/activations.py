"""What forward leaves for backward, op by op, and schedules that drop some of it.

In: a problem. Out: `Activations`: the forward ops whose outputs are read after the turn to backward and may be computed
again, with the bytes that dropping each frees there; and the sources, forward ops that only forward reads. Carrying
a source over takes memory that the plain schedule does not, and saves time where something is computed again from it;
greedy strategies never do. They are an order in which to drop; how far to go is searched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from remat.core.problem import Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.solvers.schedule.climb import climb
from remat.solvers.schedule.editable import FlatProblem, flatten
from remat.solvers.schedule.keep import missing_ops, staged_schedule, turning_point


@dataclass(frozen=True, slots=True)
class Activations:
    flat: FlatProblem
    turn: int
    ops: tuple[int, ...]
    """Ops whose outputs can be dropped."""
    sources: tuple[int, ...]
    """Ops whose outputs nothing reads after the turn, unless it is computed again."""
    held_bytes: tuple[int, ...]
    """Bytes of each op's outputs that are in memory at the turn, by op."""
    always: frozenset[int]
    """Values that are kept whatever is dropped."""

    def schedule(self, dropped: Collection[int]) -> Schedule:
        """The schedule that drops what the ops `dropped` compute and computes it again just in time."""
        return staged_schedule(self.flat, [self.kept(dropped)], [self.turn])

    def kept(self, dropped: Collection[int]) -> frozenset[int]:
        gone = set(dropped)
        stay = (op for op in (*self.ops, *self.sources) if op not in gone)
        return self.always.union(value for op in stay for value in self.flat.outputs[op])

    def present(self, dropped: Collection[int]) -> list[bool]:
        """Which values are there at the turn."""
        kept = self.kept(dropped)
        return [value in kept or self.flat.producer[value] >= self.turn for value in range(len(self.flat.size))]

    def again_time(self, op: int, present: list[bool]) -> float:
        """The time to compute the op again, its missing inputs included."""
        missing = [value for value in self.flat.inputs[op] if not present[value]]
        return self.flat.time[op] + sum(self.flat.time[other] for other in missing_ops(self.flat, missing, present))


def activations_of(problem: Problem) -> Activations:
    flat, turn = flatten(problem), turning_point(problem)
    read = {value for op in range(turn, flat.count) for value in flat.inputs[op]} | flat.final
    needed = flat.final.union(flat.inputs[turn] if turn < flat.count else ())
    held = [sum(flat.size[value] for value in flat.outputs[op] if value in read) for op in range(turn)]
    fixed = [op for op in range(turn) if not flat.recomputable[op] or not needed.isdisjoint(flat.outputs[op])]
    always = frozenset(value for op in fixed for value in flat.outputs[op])
    free = sorted(set(range(turn)).difference(fixed))
    ops, sources = tuple(op for op in free if held[op]), tuple(op for op in free if not held[op])
    return Activations(flat, turn, ops, sources, tuple(held), always)


def drop_in_order(problem: Problem, activations: Activations, order: Sequence[int]) -> Iterator[Schedule]:
    """The plain schedule, then schedules that drop the first of `order`, as few as fit the budget."""
    yield plain_schedule(problem.graph)
    lengths = range(len(order), 0, -1)
    yield from climb(problem, lengths, lambda length: activations.schedule([*order[:length], *activations.sources]))
