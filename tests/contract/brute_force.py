"""The optimum of a small problem by definition: shortest path over (next first run, what is in memory).

Shares nothing with the solvers. Memory is a set of values; dropping one is free, running an op costs its time.
"""

from __future__ import annotations

import heapq

from remat.core import Problem


def best_time(problem: Problem) -> float | None:
    """The least time of a schedule within the budget; None where there is none."""
    queue: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]
    seen: set[tuple[int, tuple[int, ...]]] = set()
    while queue:
        time, stage, memory = heapq.heappop(queue)
        if (stage, memory) in seen:
            continue
        seen.add((stage, memory))
        if stage == len(problem.graph.ops) and set(problem.graph.outputs) <= set(memory):
            return time
        for following in neighbours(problem, time, stage, memory):
            heapq.heappush(queue, following)
    return None


def neighbours(
    problem: Problem, time: float, stage: int, memory: tuple[int, ...]
) -> list[tuple[float, int, tuple[int, ...]]]:
    found = [(time, stage, tuple(value for value in memory if value != dropped)) for dropped in memory]
    for number, op in enumerate(problem.graph.ops[: stage + 1]):
        again = number < stage
        if not set(op.inputs) <= set(memory) or (again and not op.recomputable):
            continue
        # An input that is overwritten is gone, and the output takes its place.
        for gone in (set(), *({value} for value in op.overwrites)):
            after = tuple(sorted({*memory, *op.outputs} - gone))
            live = problem.resident_bytes + sum(problem.costs.size_bytes[value] for value in after)
            if live + problem.costs.workspace_bytes[number] <= problem.budget_bytes:
                found.append((time + problem.costs.time_ns[number], stage + (not again), after))
    return found
