"""Another order of first runs, where that lowers the peak: mostly weight gradients and last uses moved earlier.

In: a problem and a solver. Out: the better of the solver's answers for the graph's own order and for an order in which
ops that free at least what they allocate come as soon as they can. Forward ops stay where they are, since an executor
runs them in a call of their own, and ops that must run once keep their order among themselves.

The bound of the answer holds for any order. Fix an op j: whatever the order, its ancestors run before it and its
descendants after, so the cut program of `cuts` over those ops alone, at the single cut j, bounds every schedule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

from remat.core.graph import Graph, OpId, ValueId
from remat.core.problem import Costs, Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.core.simulate import simulate
from remat.core.solution import Solution, Status
from remat.solvers.base import TOLERANCE, Progress, Solver
from remat.solvers.bounds import safe
from remat.solvers.cuts import Cuts, Effort, solve_cuts
from remat.solvers.highs import is_available
from remat.solvers.keep import first_backward
from remat.solvers.tape import shape_of

BOUND_SHARE = 0.2
"""Of the time limit, for the bound that holds in any order."""


@final
@dataclass(frozen=True, slots=True)
class Reordered:
    """Any solver, free to change the order of first runs."""

    inner: Solver
    clock: Callable[[], float] = time.monotonic

    @property
    def name(self) -> str:
        return self.inner.name

    def solve(
        self,
        problem: Problem,
        *,
        time_limit_s: float,
        seed: int = 0,
        progress: Callable[[Progress], None] | None = None,
    ) -> Solution:
        best, order = None, lower_order(problem)
        orders = [tuple(range(len(order))), order] if order != tuple(range(len(order))) else [order]
        for position, attempt in enumerate(orders):
            share = time_limit_s * (1 - BOUND_SHARE) / (len(orders) - position)
            found = self.inner.solve(reordered(problem, attempt), time_limit_s=share, seed=seed, progress=progress)
            found = _translated(found, attempt)
            if best is None or _rank(found) < _rank(best):
                best = found
        assert best is not None
        bound = any_order_bound(problem, BOUND_SHARE * time_limit_s, self.clock)
        return _with_bound(best, min(max(bound, problem.base_time_ns), best.time_ns))


def lower_order(problem: Problem) -> tuple[int, ...]:
    """The ops in an order whose plain peak is the lowest found; the graph's own where none is lower."""
    own = tuple(range(len(problem.graph.ops)))
    orders = [own, *(_ordered(problem, greedy) for greedy in (False, True))]
    return min(orders, key=lambda order: _plain_peak(reordered(problem, order)))


def reordered(problem: Problem, order: Sequence[int]) -> Problem:
    """The same problem with its ops listed in `order`, which must be topological."""
    graph, costs = problem.graph, problem.costs
    return replace(
        problem,
        graph=replace(graph, ops=tuple(graph.ops[number] for number in order)),
        costs=replace(
            costs,
            time_ns=tuple(costs.time_ns[number] for number in order),
            workspace_bytes=tuple(costs.workspace_bytes[number] for number in order),
        ),
    )


def any_order_bound(problem: Problem, time_limit_s: float, clock: Callable[[], float]) -> float:
    """A time that no schedule within the budget beats, whatever the order of its first runs."""
    if not is_available():
        return problem.base_time_ns
    deadline, extra = clock() + time_limit_s, 0.0
    loads = simulate(problem, plain_schedule(problem.graph)).live_bytes
    for cut in sorted(range(len(loads)), key=lambda number: -loads[number])[:8]:
        left = deadline - clock()
        if left <= 0 or loads[cut] <= problem.budget_bytes:
            break
        part, position = _around(problem, cut)
        effort = Effort(time_limit_s=left, stop=lambda: clock() > deadline)
        extra = max(extra, safe(solve_cuts(shape_of(part), Cuts((position,)), part.budget_bytes, effort).extra_time))
    return problem.base_time_ns + extra


def _around(problem: Problem, cut: int) -> tuple[Problem, int]:
    """The problem of `cut`, its ancestors and its descendants alone, and where `cut` stands in it."""
    graph, costs = problem.graph, problem.costs
    producers = graph.producers()
    before, after = {cut}, {cut}
    for number in range(cut, -1, -1):
        if number in before:
            before.update(producers[value] for value in graph.ops[number].inputs)
    for number in range(cut + 1, len(graph.ops)):
        if any(producers[value] in after for value in graph.ops[number].inputs):
            after.add(number)
    chosen = sorted(before | after)
    values = [value for number in chosen for value in graph.ops[number].outputs]
    new = {value: ValueId(position) for position, value in enumerate(values)}
    # What other ops compute takes memory too, but leaving it out only lowers the bound.
    ops = tuple(
        replace(
            graph.ops[number],
            inputs=tuple(new[value] for value in graph.ops[number].inputs if value in new),
            outputs=tuple(new[value] for value in graph.ops[number].outputs),
        )
        for number in chosen
    )
    part = Graph(ops, len(values), tuple(new[value] for value in graph.outputs if value in new))
    part_costs = Costs(
        tuple(costs.time_ns[number] for number in chosen),
        tuple(costs.workspace_bytes[number] for number in chosen),
        tuple(costs.size_bytes[value] for value in values),
    )
    return replace(problem, graph=part, costs=part_costs), chosen.index(cut)


def _ordered(problem: Problem, greedy: bool) -> tuple[int, ...]:
    """Take ops that free what they allocate as soon as they are ready; else the next one, or the smallest if greedy."""
    ready = _Ready(problem)
    order: list[int] = []
    while ready.numbers:
        growth = {number: ready.growth(number) for number in ready.numbers}
        free = [number for number in ready.numbers if growth[number] <= 0]
        chosen = min(free or ready.numbers, key=lambda number: (growth[number], number) if greedy or free else number)
        order.append(chosen)
        ready.run(chosen)
    return tuple(order)


class _Ready:
    """The ops whose inputs have been computed, as one op after the other runs."""

    def __init__(self, problem: Problem) -> None:
        self.ops, self.size = problem.graph.ops, problem.costs.size_bytes
        self.readers_left = [len(readers) for readers in problem.graph.consumers()]
        for value in problem.graph.outputs:
            self.readers_left[value] += 1
        self.followers: list[list[int]] = [[] for _ in self.ops]
        self.waits_for = [0] * len(self.ops)
        for first, then in _precedence(problem):
            self.followers[first].append(then)
            self.waits_for[then] += 1
        self.numbers = {number for number, count in enumerate(self.waits_for) if not count}

    def growth(self, number: int) -> int:
        """Bytes by which memory grows when the op has run."""
        op = self.ops[number]
        made = sum(self.size[value] for value in op.outputs if self.readers_left[value])
        return made - sum(self.size[value] for value in op.inputs if self.readers_left[value] == 1)

    def run(self, number: int) -> None:
        self.numbers.remove(number)
        for value in self.ops[number].inputs:
            self.readers_left[value] -= 1
        for following in self.followers[number]:
            self.waits_for[following] -= 1
            if not self.waits_for[following]:
                self.numbers.add(following)


def _precedence(problem: Problem) -> Iterator[tuple[int, int]]:
    """Pairs of ops of which the first comes first: readers after producers, forward and ops run once as they stand."""
    producers, forward = problem.graph.producers(), first_backward(problem)
    forward = 0 if forward == len(problem.graph.ops) else forward
    pinned = -1
    for number, op in enumerate(problem.graph.ops):
        yield from ((first, number) for first in dict.fromkeys(producers[value] for value in op.inputs))
        if forward and number:
            yield min(number, forward) - 1, number
        if not op.recomputable:
            if pinned >= 0:
                yield pinned, number
            pinned = number


def _plain_peak(problem: Problem) -> int:
    return simulate(problem, plain_schedule(problem.graph)).peak_bytes


def _translated(solution: Solution, order: Sequence[int]) -> Solution:
    if solution.schedule is None:
        return solution
    return replace(solution, schedule=Schedule(tuple(OpId(order[number]) for number in solution.schedule.steps)))


def _rank(solution: Solution) -> tuple[bool, float]:
    """Schedules that fit first, the fastest of them; else the smallest budget."""
    fits = solution.schedule is not None
    return not fits, solution.time_ns if fits else solution.min_budget_bytes


def _with_bound(solution: Solution, bound_ns: float) -> Solution:
    if solution.schedule is None:
        return replace(solution, bound_ns=bound_ns)
    optimal = solution.time_ns - bound_ns <= TOLERANCE * solution.time_ns
    status = Status.OPTIMAL if optimal else Status.FEASIBLE
    return replace(solution, bound_ns=bound_ns, status=status, reason="The bound holds for any order of first runs.")
