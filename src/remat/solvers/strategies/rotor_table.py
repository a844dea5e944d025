"""The best persistent schedule of a chain of blocks, for every amount of memory at once (after rotor).

In: a `BlockChain`. Out: a `Table`, from which `kept` reads what is in memory when each block's backward begins. A
schedule is persistent if what was stored stays until backward has used it. With the inputs of blocks s to t in memory,
C(s, t, m) is the least recomputation that brings backward from block t back to block s with m more bytes:

    run block s and keep all of it, then C(s+1, t), then backward of s from what was kept; or, for some r > s,
    run blocks s to r-1 and keep only what blocks r to t read, then C(r, t), then C(s, r-1); or, where s = t,
    run block s and go back through it.

What block r-1 passed on is still there when C(s, r-1) begins: its backward may read that too. So there are two tables,
without and with these values of block t left in memory. The first run of a block is free: it happens in any case.
Memory comes in equal slots, and sizes are rounded up to them. Bytes that no choice changes (gradients, values that are
always kept) are in the need of each run and stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from remat.core.problem import Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.core.search.deadline import check_time
from remat.core.simulate import simulate
from remat.solvers.schedule.block_chain import NEVER, BlockChain, nested_schedule
from remat.solvers.schedule.climb import climb
from remat.solvers.schedule.prune import pruned

MEMORY_SLOTS = 500
BUDGET_MARGIN_FACTOR = 1.25
"""Solve for somewhat more than the budget: the model is careful, and a simulation decides."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BlockNeeds:
    """Bytes and times of running each block, on top of what is stored for the blocks around it."""

    through: Ints
    """Bytes in memory in any case when the stage of each block begins."""
    pass_bytes: Ints
    """Running the block for what later blocks read of it."""
    hold_bytes: Ints
    """Running it and keeping that and what its backward reads."""
    tape_bytes: Ints
    """Running it for what its backward reads."""
    first_pass_bytes: Ints
    """The first run, nothing kept but what later blocks read; what is in memory in any case included."""
    first_hold_bytes: Ints
    backward_bytes: Ints
    """Its stage of backward; what is in memory in any case included."""
    pass_time: Floats
    hold_time: Floats
    tape_time: Floats
    rest_time: Floats
    """As `tape_time`, where what the block passed on is still in memory."""


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """Bytes to store for blocks s to t, by (r, s, t), (s, t) and (s, t)."""

    crossing: Ints
    """What blocks r to t read of blocks s to r-1."""
    held: Ints
    """What blocks s+1 to t, or backward of s, read of block s."""
    inputs: Ints
    """What blocks s to t read of the blocks before."""
    left: Ints
    """What block s passes on to the next and its own backward reads too, by s."""


@dataclass(frozen=True, slots=True)
class Table:
    chain: BlockChain
    unit: int
    """Bytes of a slot."""
    needs: BlockNeeds
    sizes: StoredBytes
    passing: Ints
    """Bytes to run blocks s to r-1 on the way to block t, by (r, s, t)."""
    cost: Floats
    """C(s, t, m), infinite where nothing fits, by (table, s, t, m); m in slots."""
    choice: Ints
    """The r that attains it, -r where C(s, r-1) is from the second table, 0 for keeping block s whole."""

    @property
    def top(self) -> int:
        return int(self.cost.shape[3]) - 1

    def up(self, amount: int) -> int:
        return -(-int(amount) // self.unit)


def persistent_schedules(problem: Problem, chain: BlockChain) -> Iterator[Schedule]:
    """Schedules for amounts of memory around the budget, and those that fit without what they need not recompute."""
    plain_peak = max(_live_bytes(problem), default=problem.resident_bytes)
    for most_bytes in (min(int(BUDGET_MARGIN_FACTOR * problem.budget_bytes), plain_peak), plain_peak):
        table = solve_line(problem, chain, most_bytes)
        costs = table.cost[0, 0, chain.last]
        rungs = [m for m in range(table.top + 1) if np.isfinite(costs[m]) and (not m or costs[m] < costs[m - 1])]
        least = math.inf
        for schedule in climb(problem, rungs, partial(_schedule, table)):
            yield schedule
            timeline = simulate(problem, schedule)
            if timeline.peak_bytes <= problem.budget_bytes and timeline.time_ns < least:
                least = timeline.time_ns
                yield pruned(problem, schedule)
        if rungs:
            return


def _schedule(table: Table, slots: int) -> Schedule:
    return nested_schedule(table.chain, kept(table, slots))


def solve_line(problem: Problem, chain: BlockChain, most_bytes: int) -> Table:
    """Solve for every m up to `most_bytes`."""
    unit, count = max(1, -(-most_bytes // MEMORY_SLOTS)), len(chain.ends)
    flat = (2, count, count, most_bytes // unit + 1)
    needs, sizes = _needs(problem, chain), _sizes(chain)
    passing = _passing(chain, sizes, needs)
    cost, choice = np.full(flat, np.inf), np.zeros(flat, dtype=np.int64)
    table = Table(chain, unit, needs, sizes, passing, cost, choice)
    for length in range(count):
        for s in range(count - length):
            for left in (0, 1):
                _fill(table, left, s, s + length)
    return table


def kept(table: Table, slots: int) -> list[frozenset[int]]:
    """What is in memory when backward of each block begins, in the best schedule with so many slots."""
    chain, sizes, result = table.chain, table.sizes, [frozenset[int]() for _ in table.chain.ends]
    stack = [(0, 0, chain.last, slots, frozenset[int]())]
    while stack:
        left, s, t, m, stored = stack.pop()
        choice = int(table.choice[left, s, t, m])
        if s == t:
            result[s] = stored
        elif choice:
            r, stays = abs(choice), int(choice < 0)
            after = min(m + int(_freed(table, left, s, np.array([r]), t)[0]), table.top)
            after -= stays * table.up(sizes.left[r - 1])
            stack.append((stays, s, r - 1, after, stored.union(chain.left(r - 1) if stays else ())))
            crossing = chain.crossing(range(s, r), r, t)
            stack.append((left, r, t, m - table.up(sizes.crossing[r, s, t]), stored.union(crossing)))
        else:
            own = stored.union(value for value in chain.computed(s) if chain.saved[value])
            result[s] = own
            crossing = chain.crossing(range(s, s + 1), s + 1, t)
            stack.append((left, s + 1, t, m - table.up(sizes.held[s, t]), own.union(crossing)))
    return result


def _fill(table: Table, left: int, s: int, t: int) -> None:
    """C(s, t, ·), from the shorter stretches."""
    check_time()
    if s == t:
        times = table.needs.rest_time if left else table.needs.tape_time
        table.cost[left, s, s, _last_need(table, left, s) :] = 0.0 if s == table.chain.last else times[s]
        return
    if left and not table.sizes.left[t]:
        table.cost[1, s, t], table.choice[1, s, t] = table.cost[0, s, t], table.choice[0, s, t]
        return
    whole = _hold(table, left, s, t)
    splits = _splits(table, left, s, t)
    options = np.concatenate([whole[None, :], *splits])
    best = options.argmin(axis=0)
    table.cost[left, s, t] = np.take_along_axis(options, best[None, :], axis=0)[0]
    r = np.arange(s + 1, t + 1)
    table.choice[left, s, t] = np.concatenate([[0], r, -r])[best]


def _last_need(table: Table, left: int, s: int) -> int:
    """Slots to run block s and go back through it."""
    needs, chain = table.needs, table.chain
    if s == chain.last:
        run = needs.first_hold_bytes[s]
    elif chain.stages[s] == NEVER:
        return 0
    else:
        run = needs.through[s] + needs.tape_bytes[s]
    there = int(table.sizes.left[s]) if left else 0
    return max(0, table.up(max(run, needs.backward_bytes[s]) - there))


def _hold(table: Table, left: int, s: int, t: int) -> Floats:
    """The cost, by memory, of keeping block s whole until its backward."""
    needs, m = table.needs, np.arange(table.top + 1)
    first = t == table.chain.last
    run = needs.first_hold_bytes[s] if first else needs.through[t] + needs.hold_bytes[s]
    back = table.up(needs.backward_bytes[s]) - int(_freed(table, left, s, np.array([s + 1]), t)[0])
    rest = m - table.up(table.sizes.held[s, t])
    cost = (0.0 if first else needs.hold_time[s]) + table.cost[left, s + 1, t, np.maximum(rest, 0)]
    return np.where((rest >= 0) & (m >= max(table.up(run), back)), cost, np.inf)


def _splits(table: Table, left: int, s: int, t: int) -> tuple[Floats, Floats]:
    """The cost, by r and memory, of running to block r first and coming back to s after; by table for the latter."""
    needs, sizes, unit, m = table.needs, table.sizes, table.unit, np.arange(table.top + 1)[None, :]
    first, r = t == table.chain.last, np.arange(s + 1, t + 1)
    run = table.passing[r, s, t] + (0 if first else needs.through[t])
    time = 0.0 if first else np.cumsum(needs.pass_time[s:t])[:, None]
    rest = m + (-sizes.crossing[r, s, t] // unit)[:, None]
    after = np.minimum(m + _freed(table, left, s, r, t)[:, None], table.top)
    less = after + (-sizes.left[r - 1] // unit)[:, None]
    later = time + np.take_along_axis(table.cost[left, s + 1 : t + 1, t], np.maximum(rest, 0), axis=1)
    later[(rest < 0) | (m * unit < run[:, None])] = np.inf
    without = np.take_along_axis(table.cost[0, s, s:t], after, axis=1)
    beside = np.where(less < 0, np.inf, np.take_along_axis(table.cost[1, s, s:t], np.maximum(less, 0), axis=1))
    return later + without, later + beside


def _freed(table: Table, left: int, s: int, r: Ints, t: int) -> Ints:
    """Slots that are free again once backward has come back to block r: inputs that blocks s to r-1 do not read."""
    inputs = table.sizes.inputs[s, t] - table.sizes.inputs[s, r - 1]
    freed: Ints = (inputs + (table.sizes.left[t] if left else 0)) // table.unit
    return freed


def _sizes(chain: BlockChain) -> StoredBytes:
    count, size = len(chain.ends), chain.flat.size
    crossing = np.zeros((count, count, count), dtype=np.int64)
    held = np.zeros((count, count), dtype=np.int64)
    for value, block in enumerate(chain.block):
        if block == NEVER:
            continue
        check_time()
        for r in range(block + 1, count):
            following = chain.next_read(value, r)
            crossing[r, block, following:] += size[value]
        held[block, block if chain.saved[value] else chain.next_read(value, block + 1) :] += size[value]
    # So far by the block that computes a value; s is the first of the blocks that may.
    crossing = np.flip(np.cumsum(np.flip(crossing, 1), axis=1), 1)
    left = [sum(size[value] for value in chain.left(block)) for block in range(count)]
    return StoredBytes(crossing, held, crossing[:, 0, :], np.array(left, dtype=np.int64))


def _passing(chain: BlockChain, sizes: StoredBytes, needs: BlockNeeds) -> Ints:
    result = np.zeros_like(sizes.crossing)
    last = chain.last
    for i in range(last):
        need = sizes.crossing[i] + needs.pass_bytes[i]
        need[:, last] = sizes.crossing[i, :, last] + needs.first_pass_bytes[i]
        # Rows s > i do not run block i.
        need[i + 1 :] = 0
        result[i + 1] = np.maximum(result[i], need)
    return result


def _needs(problem: Problem, chain: BlockChain) -> BlockNeeds:
    always, blocks, flat = _always_bytes(problem, chain), range(len(chain.ends)), chain.flat
    taped = [{value for value in chain.computed(block) if chain.saved[value]} for block in blocks]
    passed = [set(chain.crossing([block], block + 1, chain.last)) for block in blocks]
    both = [taped[block] | passed[block] for block in blocks]
    rest = [taped[block] - chain.left(block) for block in blocks]

    def again(wanted: list[set[int]]) -> Ints:
        runs = [
            _run_bytes(chain, _run_ops(chain, block, wanted[block]), wanted[block], flat.workspace) for block in blocks
        ]
        return np.array(runs, dtype=np.int64)

    def first(stays: list[set[int]]) -> Ints:
        runs = [_run_bytes(chain, chain.ops(block), stays[block], always) for block in blocks]
        return np.array(runs, dtype=np.int64)

    def time(wanted: list[set[int]]) -> Floats:
        return np.array([sum(flat.time[op] for op in _run_ops(chain, block, wanted[block])) for block in blocks])

    return BlockNeeds(
        through=np.array([_through(chain, always, block) for block in blocks], dtype=np.int64),
        pass_bytes=again(passed),
        hold_bytes=again(both),
        tape_bytes=again(taped),
        first_pass_bytes=first(passed),
        first_hold_bytes=first(both),
        backward_bytes=np.array([_backward_bytes(chain, always, block) for block in blocks], dtype=np.int64),
        pass_time=time(passed),
        hold_time=time(both),
        tape_time=time(taped),
        rest_time=time(rest),
    )


def _always_bytes(problem: Problem, chain: BlockChain) -> tuple[int, ...]:
    """Bytes in memory while each op first runs, whatever is chosen: all but what the blocks may drop."""
    costs = problem.costs
    sizes = tuple(size if block == NEVER else 0 for size, block in zip(costs.size_bytes, chain.block, strict=True))
    return _live_bytes(replace(problem, costs=replace(costs, size_bytes=sizes)))


def _live_bytes(problem: Problem) -> tuple[int, ...]:
    return simulate(problem, plain_schedule(problem.graph)).live_bytes


def _through(chain: BlockChain, always: Sequence[int], block: int) -> int:
    """What is in memory in any case when the stage of `block` begins: recomputation runs on top of it."""
    op = chain.stages[block]
    if op == NEVER or op >= chain.flat.count:
        return 0
    made = sum(chain.flat.size[value] for value in chain.flat.outputs[op] if chain.block[value] == NEVER)
    return always[op] - chain.flat.workspace[op] - made


def _run_bytes(chain: BlockChain, ops: Sequence[int], stays: set[int], other: Sequence[int]) -> int:
    """The most bytes while `ops` run: what they compute, until its last use there unless it `stays`, and `other`."""
    flat = chain.flat
    own = {value for op in ops for value in flat.outputs[op] if chain.block[value] != NEVER}
    last = {value: op for op in ops for value in (*flat.outputs[op], *flat.inputs[op])}
    live, most = 0, 0
    for op in ops:
        live += sum(flat.size[value] for value in flat.outputs[op] if value in own)
        most = max(most, live + other[op])
        ends = (value for value in (*flat.outputs[op], *flat.inputs[op]) if last[value] == op)
        live -= sum(flat.size[value] for value in ends if value in own and value not in stays)
    return most


def _run_ops(chain: BlockChain, block: int, wanted: set[int]) -> list[int]:
    """The ops of `block` that `wanted` depends on, in order."""
    own, needed, result = set(chain.computed(block)), set(wanted), []
    for op in reversed(chain.ops(block)):
        if not needed.isdisjoint(chain.flat.outputs[op]):
            result.append(op)
            needed.update(own.intersection(chain.flat.inputs[op]))
    return result[::-1]


def _backward_bytes(chain: BlockChain, always: Sequence[int], block: int) -> int:
    """The most bytes in the block's stage of backward, on top of the block's inputs."""
    flat, ops = chain.flat, chain.stage_ops(block)
    last = {value: op for op in ops for value in flat.inputs[op] if chain.block[value] == block}
    live, most = sum(flat.size[value] for value in last), 0
    for op in ops:
        most = max(most, live + always[op])
        live -= sum(flat.size[value] for value in flat.inputs[op] if last.get(value) == op)
    return most
