"""Values that may spend a while on the host: a problem whose graph has ops that move them.

In: a problem, which values may leave the device, and how fast they move. Out: the same problem with three more ops for
each of them (`Transfer`), at the end of its list: one begins a copy to the host, one waits for it, one begins the copy
back. A schedule uses those it needs and leaves out the rest. What comes back is the same value, in memory once more, as
if it had been computed again: what is known of schedules holds as it is, what is in memory, how a plan is kept and run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from remat.core.graph import Graph, Op, OpId, Transfer, ValueId
from remat.core.problem import LARGEST_BYTES, Costs, Problem
from remat.core.schedule import Schedule
from remat.errors import InvalidGraph

OPS_PER_VALUE, MARKS_PER_VALUE = 3, 2


@dataclass(frozen=True, slots=True)
class Link:
    """How fast values move between the device and the host while ops run."""

    out_bytes_per_ns: float
    back_bytes_per_ns: float
    latency_ns: float = 0.0
    """Of every copy."""
    is_beside: bool = True
    """Whether copies run beside ops; else ops wait while a value is copied."""

    def movable(self, value: ValueId, size_bytes: int) -> Movable:
        out, back = size_bytes / self.out_bytes_per_ns, size_bytes / self.back_bytes_per_ns
        return Movable(value, self.latency_ns + out, self.latency_ns + back, self.is_beside)


@dataclass(frozen=True, slots=True)
class OffloadPlace:
    """Where values may spend a while."""

    where: str
    """As a user writes it: "cpu", "cpu:64GiB" or "disk:/a/folder"."""
    link: Link
    budget_bytes: int = LARGEST_BYTES


@dataclass(frozen=True, slots=True)
class Movable:
    """A value that may leave the device, and how long its copies take."""

    value: ValueId
    out_ns: float
    back_ns: float
    is_beside: bool = True


@dataclass(frozen=True, slots=True)
class Copies:
    """The three ops of a value that may travel."""

    out: OpId
    gone: OpId
    back: OpId


def with_copies(problem: Problem, movable: Iterable[Movable]) -> Problem:
    """See the module's docstring; raises `InvalidGraph` where a value cannot leave."""
    movable, costs = tuple(movable), problem.costs
    if not movable:
        return problem
    graph = graph_with_copies(problem.graph, [item.value for item in movable])
    beside = [time for item in movable for time in ((item.out_ns, 0.0, item.back_ns) if item.is_beside else (0.0,) * 3)]
    waited = [time for item in movable for time in ((0.0,) * 3 if item.is_beside else (item.out_ns, 0.0, item.back_ns))]
    return replace(
        problem,
        graph=graph,
        costs=Costs(
            time_ns=(*costs.time_ns, *waited),
            workspace_bytes=(*costs.workspace_bytes, *(0 for _ in waited)),
            size_bytes=(*costs.size_bytes, *(0 for _ in range(graph.value_count - len(costs.size_bytes)))),
            copy_ns=(*(0.0 for _ in costs.time_ns), *beside),
        ),
    )


def graph_with_copies(graph: Graph, values: Sequence[ValueId]) -> Graph:
    """A graph with ops that move these values."""
    _check(graph, values)
    producers = graph.producers()
    moves: list[Op] = []
    for place, value in enumerate(values):
        under_way = ValueId(graph.value_count + MARKS_PER_VALUE * place)
        moves += _moves(graph.ops[producers[value]], value, under_way)
    count = graph.value_count + MARKS_PER_VALUE * len(values)
    return replace(graph, ops=(*graph.ops, *moves), value_count=count)


def _moves(producer: Op, value: ValueId, under_way: ValueId) -> tuple[Op, Op, Op]:
    on_host = ValueId(under_way + 1)
    name, module = producer.name, producer.module
    return (
        Op(f"{name} out", (value,), (under_way,), module=module, transfer=Transfer.OUT),
        Op(f"{name} gone", (value, under_way), (on_host,), module=module, transfer=Transfer.GONE),
        Op(f"{name} back", (on_host,), (value,), module=module, transfer=Transfer.BACK),
    )


def _check(graph: Graph, values: Sequence[ValueId]) -> None:
    if has_copies(graph):
        raise InvalidGraph("The graph has ops that move values already; begin with one that has none.")
    seen: set[int] = set(graph.outputs)
    for value in values:
        if value in seen or not 0 <= value < graph.value_count:
            raise InvalidGraph(
                f"Value {value} cannot leave the device: it is an output, listed twice or out of range; leave it out."
            )
        seen.add(value)


def has_copies(graph: Graph) -> bool:
    return bool(graph.ops) and graph.ops[-1].transfer is not None


def copies_of(graph: Graph) -> dict[ValueId, Copies]:
    """For each value that may travel, the ops that move it."""
    first = len(graph.ops) - sum(op.transfer is not None for op in graph.ops)
    numbers = range(first, len(graph.ops), OPS_PER_VALUE)
    return {graph.ops[at].inputs[0]: Copies(OpId(at), OpId(at + 1), OpId(at + 2)) for at in numbers}


def movable_of(problem: Problem) -> tuple[Movable, ...]:
    """What `with_copies` was given."""
    beside, waited = problem.costs.copy_ns, problem.costs.time_ns
    found = []
    for value, ops in copies_of(problem.graph).items():
        out, back = (beside[op] + waited[op] for op in (ops.out, ops.back))
        found.append(Movable(value, out, back, is_beside=not (waited[ops.out] or waited[ops.back])))
    return tuple(found)


def without_copies(problem: Problem) -> Problem:
    """The problem in which nothing leaves the device; its ops and values keep their numbers."""
    if not has_copies(problem.graph):
        return problem
    graph, costs = problem.graph, problem.costs
    moved = len(copies_of(graph))
    ops, values = len(graph.ops) - OPS_PER_VALUE * moved, graph.value_count - MARKS_PER_VALUE * moved
    return replace(
        problem,
        graph=replace(graph, ops=graph.ops[:ops], value_count=values),
        costs=Costs(costs.time_ns[:ops], costs.workspace_bytes[:ops], costs.size_bytes[:values]),
    )


def only_used(problem: Problem, schedule: Schedule) -> tuple[Problem, Schedule]:
    """The same without the ops that `schedule` leaves out."""
    used, before = set(schedule.steps), copies_of(problem.graph)
    stay = [item for item in movable_of(problem) if before[item.value].out in used]
    if len(stay) == len(before):
        return problem, schedule
    plain = without_copies(problem)
    changed = with_copies(plain, stay)
    after = copies_of(changed.graph)
    renamed: dict[OpId, OpId] = {}
    for value, now in after.items():
        renamed |= {before[value].out: now.out, before[value].gone: now.gone, before[value].back: now.back}
    return changed, Schedule(tuple(renamed.get(step, step) for step in schedule.steps))


def computing_steps(graph: Graph, schedule: Schedule) -> Schedule:
    """The same without the steps that move values."""
    return Schedule(tuple(step for step in schedule.steps if graph.ops[step].transfer is None))
