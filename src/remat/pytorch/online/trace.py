"""The ops of a step as they ran, as a problem for the solvers.

In: each op with its time, what it read and what it made. Out: a `Problem` whose plain schedule is the step without any
eviction, and a `Hindsight`: how much slower the step was than the best schedule that is known with all of it in view.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from remat.core.graph import Graph, Op, ValueId
from remat.core.problem import Costs, Problem
from remat.core.solution import Solution


@dataclass(slots=True)
class TracedOp:
    name: str
    time_ns: float
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    backward: bool
    recomputable: bool


class Trace:
    """Ops in order, and the bytes of every value."""

    def __init__(self) -> None:
        self.ops: list[TracedOp] = []
        self.sizes: list[int] = []
        self._makers: list[int] = []
        self._read: set[int] = set()

    def value(self, size_bytes: int) -> int:
        """The number of a new value, which the next op makes."""
        self.sizes.append(size_bytes)
        self._makers.append(len(self.ops))
        return len(self.sizes) - 1

    def op(self, name: str, time_ns: float, reads: Iterable[int], makes: Sequence[int], *, backward: bool) -> TracedOp:
        traced = TracedOp(name, time_ns, tuple(dict.fromkeys(reads)), tuple(makes), backward, recomputable=True)
        self.ops.append(traced)
        self._read |= set(traced.reads)
        return traced

    def merge(self, number: int, time_ns: float, reads: Iterable[int]) -> bool:
        """Make a write part of the op that made what it writes to, if nobody read that and it needs nothing later."""
        maker = self._makers[number]
        others = set(reads) - {number}
        is_early = all(self._makers[other] < maker for other in others)
        if not is_early or number in self._read or not self.ops[maker].recomputable:
            return False
        op = self.ops[maker]
        op.time_ns += time_ns
        op.reads = tuple(dict.fromkeys((*op.reads, *others)))
        self._read |= others
        return True

    def fix(self, number: int) -> None:
        """A value is written to: neither it nor what it becomes can be computed apart from the other."""
        if self._makers[number] < len(self.ops):
            self.ops[self._makers[number]].recomputable = False

    def problem(self, budget_bytes: int, outputs: Iterable[int]) -> Problem:
        ops = tuple(
            Op(
                name=f"{place}_{op.name}",
                inputs=tuple(map(ValueId, op.reads)),
                outputs=tuple(map(ValueId, op.makes)),
                backward=op.backward,
                recomputable=op.recomputable,
                target=op.name,
            )
            for place, op in enumerate(self.ops)
        )
        graph = Graph(ops, len(self.sizes), tuple(map(ValueId, sorted(set(outputs)))), "online")
        times = tuple(op.time_ns for op in self.ops)
        return Problem(graph, Costs(times, (0,) * len(ops), tuple(self.sizes)), budget_bytes)


@dataclass(frozen=True, slots=True)
class Hindsight:
    """A step that was rematerialized online, beside the best schedule for the same ops within the same memory."""

    online_ns: float
    plain_ns: float
    budget_bytes: int
    solution: Solution

    @property
    def excess(self) -> float:
        """By which share the step took longer than the best schedule that is known."""
        return self.online_ns / self.solution.time_ns - 1 if self.solution.time_ns else 0.0

    @property
    def most_excess(self) -> float:
        """The same beside the proven bound, below which no schedule is."""
        return self.online_ns / self.solution.bound_ns - 1 if self.solution.bound_ns else 0.0

    def __str__(self) -> str:
        what = "the optimum" if self.solution.gap <= 1e-3 else "the best schedule known"
        return (
            f"online was {self.excess:.1%} above {what} of this trace, and at most {self.most_excess:.1%} above any "
            "schedule"
        )
