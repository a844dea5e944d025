"""Another order of first runs, where that lowers the peak: mostly weight gradients and last uses moved earlier.

In: a problem and a solver. Out: the better of the solver's answers for the graph's own order and for the order that
`order` finds.

The bound of the answer holds for any order. Fix an op j: whatever the order, its ancestors run before it and its
descendants after, so the cut program of `cuts` over those ops alone, at the single cut j, bounds every schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import final

from remat.core.graph import Graph, ValueId
from remat.core.problem import Costs, Problem
from remat.core.schedule import plain_schedule
from remat.core.search.deadline import OutOfTime
from remat.core.search.limits import Countdown, Limits
from remat.core.simulate import simulate
from remat.core.solution import Solution, Status
from remat.solvers.backends.linear_highs import is_available
from remat.solvers.base import TOLERANCE, Progress
from remat.solvers.exact.bounds import MAX_COLUMNS, safe
from remat.solvers.exact.cuts import Cuts, solve_cuts
from remat.solvers.schedule.editable import flatten
from remat.solvers.schedule.order import lower_order, reordered, translated
from remat.solvers.schedule.overwrite import always_overwritten
from remat.solvers.wrapping import WrappingSolver

BOUND_SHARE = 0.2
"""Of the time limit, for the bound that holds in any order."""


@final
@dataclass(frozen=True, slots=True)
class Reordered(WrappingSolver):
    """Any solver, free to change the order of first runs."""

    def solve(self, problem: Problem, limits: Limits, progress: Callable[[Progress], None] | None = None) -> Solution:
        countdown, best = Countdown(limits), None
        own = tuple(range(len(problem.graph.ops)))
        orders = [own]
        with suppress(OutOfTime):
            orders = list(dict.fromkeys((own, lower_order(problem))))
        kept_back_s = BOUND_SHARE * limits.time_limit_s
        for position, attempt in enumerate(orders):
            share = max(0.0, countdown.left_s() - kept_back_s) / (len(orders) - position)
            found = self.inner.solve(reordered(problem, attempt), limits.within(share), progress)
            if found.schedule is not None:
                found = replace(found, schedule=translated(found.schedule, attempt))
            if best is None or _rank(found) < _rank(best):
                best = found
        assert best is not None
        bound = any_order_bound(problem, Limits(min(kept_back_s, countdown.left_s()), clock=limits.clock))
        return _with_bound(best, min(max(bound, problem.base_time_ns), best.time_ns))


def any_order_bound(problem: Problem, limits: Limits) -> float:
    """A time that no schedule within the budget beats, whatever the order of its first runs."""
    if not is_available() or 2 * len(problem.graph.ops) > MAX_COLUMNS:
        return problem.base_time_ns
    countdown, extra, problem = Countdown(limits), 0.0, always_overwritten(problem)
    loads = simulate(problem, plain_schedule(problem.graph)).live_bytes
    for cut in sorted(range(len(loads)), key=lambda number: -loads[number])[:8]:
        left = countdown.left_s()
        if left <= 0 or loads[cut] <= problem.budget_bytes:
            break
        part, position = _around(problem, cut)
        answer = solve_cuts(
            flatten(part),
            Cuts((position,)),
            part.budget_bytes,
            limits.within(left),
            stop=lambda: countdown.left_s() <= 0,
        )
        extra = max(extra, safe(answer.extra_time))
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
