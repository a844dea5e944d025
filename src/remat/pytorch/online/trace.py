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
        self.sizes: list[int] = []
        self._ops: list[TracedOp | None] = []
        self._makers: list[int] = []
        self._read: set[int] = set()

    @property
    def ops(self) -> list[TracedOp]:
        return [op for op in self._ops if op is not None]

    def value(self, size_bytes: int) -> int:
        """The number of a new value, which the next op makes."""
        self.sizes.append(size_bytes)
        self._makers.append(len(self._ops))
        return len(self.sizes) - 1

    def op(self, name: str, time_ns: float, reads: Iterable[int], makes: Sequence[int], *, backward: bool) -> TracedOp:
        traced = TracedOp(name, time_ns, tuple(dict.fromkeys(reads)), tuple(makes), backward, recomputable=True)
        self._ops.append(traced)
        self._read.update(traced.reads)
        return traced

    def merge(self, number: int, time_ns: float, reads: Iterable[int]) -> bool:
        """Make a write one op with that which made what it writes to, in the writing one's place, if nobody has read
        what was made.
        """
        maker = self._makers[number]
        before = self._ops[maker]
        assert before is not None, "the maker of a value is there"
        if not before.recomputable or not self._read.isdisjoint(before.makes):
            return False
        self._ops[maker] = None
        for made in before.makes:
            self._makers[made] = len(self._ops)
        others = (other for other in (*before.reads, *reads) if other not in before.makes)
        self.op(before.name, before.time_ns + time_ns, others, before.makes, backward=before.backward)
        return True

    def fix(self, number: int) -> None:
        """A value is written to: neither it nor what it becomes can be computed apart from the other."""
        made = self._ops[self._makers[number]]
        if made is not None:
            made.recomputable = False

    def problem(self, budget_bytes: int, outputs: Iterable[int]) -> Problem:
        found = self.ops
        ops = tuple(
            Op(
                name=f"{place}_{op.name}",
                inputs=tuple(map(ValueId, op.reads)),
                outputs=tuple(map(ValueId, op.makes)),
                backward=op.backward,
                recomputable=op.recomputable,
                target=op.name,
            )
            for place, op in enumerate(found)
        )
        graph = Graph(ops, len(self.sizes), tuple(map(ValueId, sorted(set(outputs)))), "online")
        times = tuple(op.time_ns for op in found)
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
