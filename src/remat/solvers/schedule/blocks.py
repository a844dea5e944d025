"""The chain that a forward computation is: places where little crosses from what was computed to what comes next.

In: a problem. Out: cut points, as forward ops after which only one large value is still read by forward ops. Small,
widely shared values such as masks and positions are ignored: they are kept whatever happens.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.core.problem import Problem
from remat.core.search.deadline import check_time
from remat.solvers.schedule.keep import first_backward, turning_point

SMALL_SHARE = 0.02
"""A value below this share of the largest forward value does not count as crossing."""
MAX_BLOCKS = 64
MIN_OPS = 3


@dataclass(frozen=True, slots=True)
class Chain:
    """Forward as a chain of blocks: block k ends with op `cuts[k]`; forward reads `crossing[k]` after it."""

    cuts: tuple[int, ...]
    crossing: tuple[frozenset[int], ...]
    tail: frozenset[int]
    """What is computed after the last cut: backward starts there, so dropping it would gain nothing."""


def find_chain(problem: Problem, min_ops: int = MIN_OPS) -> Chain:
    """Blocks of at least `min_ops` ops each, and what comes after the last of them."""
    forward = turning_point(problem)
    last_reads = _last_forward_reads(problem, forward)
    size, small = problem.costs.size_bytes, _small_bytes(problem, forward)
    open_values: set[int] = set()
    cuts: list[int] = []
    crossing: list[frozenset[int]] = []
    shortest = max(min_ops, forward // MAX_BLOCKS)
    for number in range(forward):
        check_time()
        op = problem.graph.ops[number]
        open_values |= {value for value in op.outputs if last_reads[value] > number}
        open_values -= {value for value in op.inputs if last_reads[value] <= number}
        large = [value for value in open_values if size[value] > small]
        if len(large) == 1 and number - (cuts[-1] if cuts else -1) >= shortest:
            cuts.append(number)
            crossing.append(frozenset(open_values))
    tail = {value for op in problem.graph.ops[cuts[-1] + 1 if cuts else 0 : forward] for value in op.outputs}
    return Chain(tuple(cuts), tuple(crossing), frozenset(tail))


def find_narrow_cuts(problem: Problem) -> tuple[int, ...]:
    """Forward ops to cut after, wherever several values cross too: every op, or in long graphs the narrowest places."""
    forward = turning_point(problem)
    last_reads, size = _last_forward_reads(problem, forward), problem.costs.size_bytes
    crossing, widths = 0, []
    for number in range(forward):
        op = problem.graph.ops[number]
        crossing += sum(size[value] for value in op.outputs if last_reads[value] > number)
        crossing -= sum(size[value] for value in op.inputs if last_reads[value] == number)
        widths.append(crossing)
    window = -(-forward // MAX_BLOCKS)
    places = (range(start, min(start + window, forward)) for start in range(0, forward, max(window, 1)))
    return tuple(min(place, key=widths.__getitem__) for place in places)


def kept_at(chain: Chain, every: int) -> frozenset[int]:
    """What crosses the cuts, every `every`-th of them: the inputs of the segments that are recomputed."""
    return chain.tail.union(*chain.crossing[every - 1 :: every])


def small_values(problem: Problem) -> frozenset[int]:
    """Forward values too small to be worth dropping."""
    forward = first_backward(problem)
    small, size = _small_bytes(problem, forward), problem.costs.size_bytes
    values = (value for op in problem.graph.ops[:forward] for value in op.outputs)
    return frozenset(value for value in values if size[value] <= small)


def _small_bytes(problem: Problem, forward: int) -> int:
    size = problem.costs.size_bytes
    largest = max((size[value] for op in problem.graph.ops[:forward] for value in op.outputs), default=0)
    return int(largest * SMALL_SHARE)


def _last_forward_reads(problem: Problem, forward: int) -> list[int]:
    result = [-1] * problem.graph.value_count
    for number in range(forward):
        for value in problem.graph.ops[number].inputs:
            result[value] = number
    return result
