"""Another order of first runs that lowers the peak and costs nothing: mostly weight gradients and last uses earlier.

In: a problem. Out: its ops in an order whose plain peak is the lowest found, overwriting counted. Four orders are
compared: the graph's own, one in which weight gradients and other outputs come as soon as they can, and two that run an
op as soon as it frees what it allocates. The best is then improved
where its peak is: an op that frees memory is pulled before the peak, or one that allocates is pushed behind it.

Where even the lowest plain peak is too much, forward's values can be computed again, and backward's mostly cannot: an
order that puts all weight gradients last has a lower plain peak, and keeps what they read of every layer. So what
backward holds by itself counts as much as the plain peak does then.

Forward ops stay where they are, since an executor runs them in a call of their own; ops that must run once keep their
order among themselves; and nothing passes an op that stands for the caller. The same problem gives the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from heapq import heapify, heappop, heappush

from remat.core.copies import without_copies
from remat.core.eager import without_overwrites
from remat.core.graph import Op, OpId
from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.search.deadline import check_time
from remat.core.simulate import Timeline, simulate
from remat.solvers.schedule.keep import first_backward

REACH_STEPS = 40
"""How many steps around the peak are looked at for ops to move across it."""
SIMULATED_STEPS = 400_000
"""Steps simulated, at most, while the order is improved: about half a second."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """An order of a problem's ops, and what it does to the plain peak."""

    order: tuple[int, ...]
    before_bytes: int
    after_bytes: int

    @property
    def is_own(self) -> bool:
        return self.order == tuple(range(len(self.order)))


def order_ops(problem: Problem) -> Ordered:
    """The order with the lowest plain peak found, with the figures of the graph's own order and of this one.

    Ops that move values stay at the end of the list.
    """
    moves, problem = range(len(problem.graph.ops)), without_copies(problem)
    own = tuple(range(len(problem.graph.ops)))
    bare = _backward_alone(problem)
    peak_of = cache(partial(_peak, problem))

    @cache
    def burden(order: tuple[int, ...]) -> tuple[bool, int]:
        is_over = peak_of(order) > problem.budget_bytes
        return is_over, peak_of(order) + _peak(bare, order) if is_over else peak_of(order)

    orders = [own, *(_ordered(problem, rule) for rule in (_outputs_first, _free_first, _smallest_first))]
    best = min(dict.fromkeys(orders), key=burden)
    found = min(best, _Improver(problem).improve(best), key=burden)
    before, after = peak_of(own), peak_of(found)
    rest = tuple(moves[len(own) :])
    return Ordered((*found, *rest), before, after) if after < before else Ordered((*own, *rest), before, before)


def _backward_alone(problem: Problem) -> Problem:
    """The same where what forward makes takes no memory, as if all of it were computed again where it is read."""
    turn, problem = first_backward(problem), without_overwrites(problem)
    made = {value for op in problem.graph.ops[:turn] for value in op.outputs}
    sizes = (0 if value in made else size for value, size in enumerate(problem.costs.size_bytes))
    return replace(problem, costs=replace(problem.costs, size_bytes=tuple(sizes)))


def lower_order(problem: Problem) -> tuple[int, ...]:
    """The ops in an order whose plain peak is the lowest found; the graph's own where none is lower."""
    return order_ops(problem).order


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


def translated(schedule: Schedule, order: Sequence[int]) -> Schedule:
    """A schedule of `reordered(problem, order)` as one of `problem`."""
    return Schedule(tuple(OpId(order[number]) for number in schedule.steps))


class _Improver:
    """Moves single ops across the peak as long as that lowers it."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.first, self.then = _neighbours(problem)
        self.size, self.ops = problem.costs.size_bytes, problem.graph.ops
        self.work_left = SIMULATED_STEPS

    def improve(self, order: tuple[int, ...]) -> tuple[int, ...]:
        best, timeline = order, self._simulate(order)
        while self.work_left > 0:
            found = next((item for item in self._moves(best, timeline) if _is_better(item[1], timeline)), None)
            if found is None:
                break
            best, timeline = found
        return best

    def _moves(self, order: tuple[int, ...], timeline: Timeline) -> Iterator[tuple[tuple[int, ...], Timeline]]:
        """Every order that is one move away, pulls before pushes, the nearest first."""
        peak = timeline.peak_step
        place = {number: position for position, number in enumerate(order)}
        for position in range(peak + 1, min(peak + REACH_STEPS, len(order))):
            number = order[position]
            if all(place[other] < peak for other in self.first[number]):
                yield self._moved(order, position, peak)
        for position in range(peak - 1, max(peak - REACH_STEPS, -1), -1):
            number = order[position]
            if all(place[other] > peak for other in self.then[number]):
                yield self._moved(order, position, peak)
            if self.work_left <= 0:
                return

    def _moved(self, order: tuple[int, ...], position: int, to: int) -> tuple[tuple[int, ...], Timeline]:
        steps = list(order)
        steps.insert(to, steps.pop(position))
        return tuple(steps), self._simulate(steps)

    def _simulate(self, order: Sequence[int]) -> Timeline:
        check_time()
        self.work_left -= len(order)
        return simulate(self.problem, _schedule(order))


def _is_better(new: Timeline, old: Timeline) -> bool:
    """A lower peak, or the same fewer times."""
    if new.peak_bytes != old.peak_bytes:
        return new.peak_bytes < old.peak_bytes
    return new.live_bytes.count(new.peak_bytes) < old.live_bytes.count(old.peak_bytes)


def _peak(problem: Problem, order: Sequence[int]) -> int:
    return simulate(problem, _schedule(order)).peak_bytes


def _schedule(order: Sequence[int]) -> Schedule:
    return Schedule(tuple(OpId(number) for number in order))


Rule = Callable[["_Ready", int], tuple[int, int]]
"""Of the ops that are ready, the one with the smallest key runs next; keys only fall while an op waits."""


def _ordered(problem: Problem, rule: Rule) -> tuple[int, ...]:
    ready = _Ready(problem)
    order: list[int] = []
    waiting = [(rule(ready, number), number) for number in ready.numbers]
    heapify(waiting)
    while waiting:
        check_time()
        _, number = heappop(waiting)
        if number not in ready.numbers:
            # It ran when its key was lower.
            continue
        order.append(number)
        for changed in ready.run(number):
            heappush(waiting, (rule(ready, changed), changed))
    return tuple(order)


def _outputs_first(ready: _Ready, number: int) -> tuple[int, int]:
    """An op that makes nothing but outputs of the graph, else the next."""
    return not ready.makes_outputs[number], number


def _free_first(ready: _Ready, number: int) -> tuple[int, int]:
    """The op that frees most beyond what it allocates, else the next."""
    return min(ready.growth(number), 1), number


def _smallest_first(ready: _Ready, number: int) -> tuple[int, int]:
    """The op after which least is in memory."""
    return ready.growth(number), number


class _Ready:
    """The ops whose inputs have been computed, as one op after the other runs."""

    def __init__(self, problem: Problem) -> None:
        self.ops, self.size = problem.graph.ops, problem.costs.size_bytes
        self.readers = problem.graph.consumers()
        self.readers_left = [len(readers) for readers in self.readers]
        for value in problem.graph.outputs:
            self.readers_left[value] += 1
        final = set(problem.graph.outputs)
        self.makes_outputs = [bool(op.outputs) and final.issuperset(op.outputs) for op in self.ops]
        first, self.followers = _neighbours(problem)
        self.waits_for = [len(others) for others in first]
        self.numbers = {number for number, count in enumerate(self.waits_for) if not count}

    def growth(self, number: int) -> int:
        """Bytes by which memory grows when the op has run."""
        op = self.ops[number]
        made = sum(self.size[value] for value in op.outputs if self.readers_left[value])
        return made - sum(self.size[value] for value in op.inputs if self.readers_left[value] == 1)

    def run(self, number: int) -> list[int]:
        """Run an op; the ops that are ready by that, and those that now free an input when they run."""
        self.numbers.remove(number)
        changed: list[int] = []
        for value in self.ops[number].inputs:
            self.readers_left[value] -= 1
            if self.readers_left[value] == 1:
                changed += [reader for reader in self.readers[value] if reader in self.numbers]
        for following in self.followers[number]:
            self.waits_for[following] -= 1
            if not self.waits_for[following]:
                self.numbers.add(following)
                changed.append(following)
        return changed


def _neighbours(problem: Problem) -> tuple[list[list[int]], list[list[int]]]:
    """For each op, the ops that must come before it and those that must come after it."""
    count = len(problem.graph.ops)
    first: list[list[int]] = [[] for _ in range(count)]
    then: list[list[int]] = [[] for _ in range(count)]
    for before, after in dict.fromkeys(_precedence(problem)):
        first[after].append(before)
        then[before].append(after)
    return first, then


def _precedence(problem: Problem) -> Iterator[tuple[int, int]]:
    """Pairs of ops of which the first comes first: readers after producers, forward and ops run once as they stand."""
    producers, forward = problem.graph.producers(), first_backward(problem)
    forward = 0 if forward == len(problem.graph.ops) else forward
    pinned, fence = -1, -1
    for number, op in enumerate(problem.graph.ops):
        yield from ((first, number) for first in dict.fromkeys(producers[value] for value in op.inputs))
        if forward and number:
            yield min(number, forward) - 1, number
        if not op.recomputable:
            if pinned >= 0:
                yield pinned, number
            pinned = number
        if _is_fence(op):
            yield from ((earlier, number) for earlier in range(max(fence, 0), number))
            fence = number
        elif fence >= 0:
            yield fence, number


def _is_fence(op: Op) -> bool:
    """Whether the op stands for what the caller does: no program of a graph runs across it."""
    return not op.recomputable and not op.target
