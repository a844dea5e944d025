"""Values that spend a while on the host, as a problem of ops alone.

In: a problem, and which values leave the device when. Out: a problem whose graph has ops that begin a copy to the host,
wait for it and begin the copy back (`Transfer`). What comes back is the same value, in memory once more, as if it had
been computed again: everything that is known of schedules holds as it is, what is in memory, what may run again, how a
plan is kept and run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from remat.core.graph import Graph, Op, OpId, Transfer, ValueId
from remat.core.problem import Costs, Problem
from remat.errors import InvalidGraph


@dataclass(frozen=True, slots=True)
class Link:
    """How fast values move between the device and the host while ops run."""

    out_bytes_per_ns: float
    back_bytes_per_ns: float
    latency_ns: float = 0.0
    """Of every copy."""

    def out_ns(self, size_bytes: int) -> float:
        return self.latency_ns + size_bytes / self.out_bytes_per_ns

    def back_ns(self, size_bytes: int) -> float:
        return self.latency_ns + size_bytes / self.back_bytes_per_ns


@dataclass(frozen=True, slots=True)
class Away:
    """A value that is on the host for a while."""

    value: ValueId
    after: OpId
    """Its copy out is waited for when this op has first run; it begins when the value is made."""
    before: OpId
    """Its copy back begins before this op first runs."""


@dataclass(frozen=True, slots=True)
class Copies:
    """The three ops of a value that travels."""

    out: OpId
    gone: OpId
    back: OpId


@dataclass(frozen=True, slots=True)
class WithCopies:
    """A problem with copies, and where the ops of the one it was made of are in it."""

    problem: Problem
    op_of: tuple[OpId, ...]
    """For each op of the problem without copies, its number now."""
    copies: tuple[Copies, ...]
    """In the order in which they were asked for."""


def with_copies(problem: Problem, away: Iterable[Away], link: Link) -> WithCopies:
    """See the module's docstring; raises `InvalidGraph` where a value cannot leave when it should."""
    away = tuple(away)
    _check(problem.graph, away)
    maker = _Maker(problem, link)
    for item in away:
        maker.add(item)
    return maker.made(away)


class _Maker:
    """Puts ops of copies between those of a problem."""

    def __init__(self, problem: Problem, link: Link) -> None:
        self._problem, self._link = problem, link
        self._sizes = list(problem.costs.size_bytes)
        self._producers = problem.graph.producers()
        self._following: defaultdict[int, list[tuple[Op, float]]] = defaultdict(list)
        """Ops that come after each op of the problem, with the times of the copies that they begin."""
        self._gone: defaultdict[int, list[tuple[Op, float]]] = defaultdict(list)
        """Those that wait come after those that begin a copy."""
        self._back: defaultdict[int, list[tuple[Op, float]]] = defaultdict(list)
        """Ops that come before each op of the problem."""

    def add(self, item: Away) -> None:
        value, ops = item.value, self._problem.graph.ops
        producer, size = self._producers[value], self._sizes[value]
        name, module = ops[producer].name, ops[producer].module
        under_way, on_host = self._new_mark(), self._new_mark()
        out = Op(f"{name} out", (value,), (under_way,), False, recomputable=False, module=module, transfer=Transfer.OUT)
        gone = replace(out, name=f"{name} gone", inputs=(value, under_way), outputs=(on_host,), transfer=Transfer.GONE)
        back = replace(out, name=f"{name} back", inputs=(on_host,), outputs=(value,), transfer=Transfer.BACK)
        self._following[producer].append((replace(out, backward=ops[producer].backward), self._link.out_ns(size)))
        self._gone[item.after].append((replace(gone, backward=ops[item.after].backward), 0.0))
        self._back[item.before].append((replace(back, backward=ops[item.before].backward), self._link.back_ns(size)))

    def _new_mark(self) -> ValueId:
        """A value without bytes, which only says that something has happened."""
        self._sizes.append(0)
        return ValueId(len(self._sizes) - 1)

    def made(self, away: tuple[Away, ...]) -> WithCopies:
        ops: list[Op] = []
        rows: list[tuple[float, int, float]] = []
        op_of: list[OpId] = []

        def append(found: Iterable[tuple[Op, float]]) -> None:
            for op, copy_ns in found:
                ops.append(op)
                rows.append((0.0, 0, copy_ns))

        costs = self._problem.costs
        for number, op in enumerate(self._problem.graph.ops):
            append(self._back[number])
            op_of.append(OpId(len(ops)))
            ops.append(op)
            rows.append((costs.time_ns[number], costs.workspace_bytes[number], 0.0))
            append(self._following[number])
            append(self._gone[number])
        graph = replace(self._problem.graph, ops=tuple(ops), value_count=len(self._sizes))
        times, spaces, copy_ns = zip(*rows, strict=True) if rows else ((), (), ())
        problem = replace(self._problem, graph=graph, costs=Costs(times, spaces, tuple(self._sizes), copy_ns))
        return WithCopies(problem, tuple(op_of), _copies(graph, away))


def _copies(graph: Graph, away: tuple[Away, ...]) -> tuple[Copies, ...]:
    found: dict[tuple[Transfer, int], OpId] = {}
    for number, op in enumerate(graph.ops):
        if op.transfer is not None:
            found[op.transfer, op.outputs[0] if op.transfer is Transfer.BACK else op.inputs[0]] = OpId(number)
    return tuple(Copies(*(found[kind, item.value] for kind in Transfer)) for item in away)


def _check(graph: Graph, away: tuple[Away, ...]) -> None:
    producers, seen = graph.producers(), set[int]()
    for item in away:
        if item.value in graph.outputs or item.value in seen:
            raise InvalidGraph(f"Value {item.value} cannot leave the device: it is an output, or listed twice.")
        if not producers[item.value] <= item.after < item.before < len(graph.ops):
            raise InvalidGraph(
                f"Value {item.value}, which op {producers[item.value]} makes, cannot leave after op {item.after} and "
                f"come back before op {item.before}."
            )
        seen.add(item.value)
