"""Forward as a chain of blocks, and backward as the stages in which it comes back to them, last block first.

In: a problem and the ops after which forward is cut. Out: a `BlockChain`, and schedules from what is in memory when
each stage begins. That is enough for nested recomputation: a stage computes what it lacks from what is there, and what
the next stages are to find of it stays. Values that are small, outputs of the step or made by ops that run once are
always kept. The last block is what comes after the last cut, nothing where that is the last op of forward; its values
are still there when backward begins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.search.deadline import check_time
from remat.solvers.schedule.blocks import small_values
from remat.solvers.schedule.editable import FlatProblem, flatten
from remat.solvers.schedule.keep import staged_schedule, turning_point

NEVER = -1


@dataclass(frozen=True, slots=True)
class BlockChain:
    flat: FlatProblem
    turn: int
    """The first op of backward."""
    ends: tuple[int, ...]
    """One past the last op of each block."""
    stages: tuple[int, ...]
    """The op at which backward first needs each block, or `NEVER`."""
    block: tuple[int, ...]
    """The block that computes each value; `NEVER` for values that are always kept."""
    reads: tuple[tuple[int, ...], ...]
    """The blocks in which each value is read, forward or backward, in order; backward ops count by their stage."""
    saved: tuple[bool, ...]
    """Does backward of its own block, or anything after it, read the value?"""

    @property
    def last(self) -> int:
        return len(self.ends) - 1

    def ops(self, block: int) -> range:
        return range(self.ends[block - 1] if block else 0, self.ends[block])

    def stage_ops(self, block: int) -> range:
        """The ops of backward that come back to `block`; none where it is never needed."""
        start = self.stages[block]
        below = [self.stages[number] for number in range(block) if self.stages[number] != NEVER]
        end = min(below, default=self.flat.count)
        return range(start, end) if start != NEVER else range(0)

    def computed(self, block: int) -> list[int]:
        """The values of `block` that may be dropped."""
        check_time()
        outputs = (value for op in self.ops(block) for value in self.flat.outputs[op])
        return [value for value in outputs if self.block[value] == block]

    def crossing(self, blocks: Iterable[int], first: int, last: int) -> list[int]:
        """The values of `blocks` that blocks `first` to `last` read."""
        values = (value for block in blocks for value in self.computed(block))
        return [value for value in values if self.next_read(value, first) <= last]

    def left(self, block: int) -> set[int]:
        """What `block` passes on to the next and its own backward reads too: in memory when that begins."""
        values = self.computed(block)
        return {value for value in values if self.saved[value] and self.next_read(value, block + 1) == block + 1}

    def next_read(self, value: int, block: int) -> int:
        """The first block from `block` on that reads the value; one past the last where none does."""
        return next((number for number in self.reads[value] if number >= block), len(self.ends))


def block_chain_of(problem: Problem, cuts: Iterable[int]) -> BlockChain:
    flat, turn = flatten(problem), turning_point(problem)
    ends = (*sorted({cut + 1 for cut in cuts}), turn)
    block = _blocks(problem, flat, ends)
    forward = _forward_reads(flat, ends)
    stages = _stages(flat, block, forward, turn, len(ends))
    reads, saved = _all_reads(flat, stages, block, forward, turn)
    return BlockChain(flat, turn, ends, stages, block, reads, saved)


def nested_schedule(chain: BlockChain, kept: Sequence[Collection[int]]) -> Schedule:
    """The schedule in which backward of block k goes on with `kept[k]` and nothing else of the blocks before k.

    A value stays from one stage to the next if both are to have it; otherwise the later one computes it again.
    """
    held: dict[int, set[int]] = {}
    # Backward begins right after the last block, whose values are still there.
    later = {value for value, block in enumerate(chain.block) if block in (NEVER, chain.last)}
    before = set(kept[-1])
    for number in reversed(range(len(chain.ends))):
        if chain.stages[number] != NEVER:
            held[chain.stages[number]] = later | before.intersection(kept[number])
            before = set(kept[number])
        later.update(chain.computed(number))
    return staged_schedule(chain.flat, list(held.values()), list(held))


def checkpoint_schedule(chain: BlockChain, stored: Sequence[Collection[int]]) -> Schedule:
    """The same, with `stored[k]` naming the blocks whose inputs are in memory."""
    crossing = [chain.crossing(range(block), block, chain.last) for block in range(len(chain.ends))]
    left = [chain.left(block) for block in range(len(chain.ends))]
    kept = [
        {*left[number], *left[max(number - 1, 0)], *(value for block in blocks for value in crossing[block])}
        for number, blocks in enumerate(stored)
    ]
    return nested_schedule(chain, kept)


def _blocks(problem: Problem, flat: FlatProblem, ends: Sequence[int]) -> tuple[int, ...]:
    small, number, result = small_values(problem), 0, [NEVER] * len(flat.size)
    for op in range(ends[-1]):
        number += op == ends[number]
        for value in flat.outputs[op]:
            if flat.recomputable[op] and value not in flat.final and value not in small:
                result[value] = number
    return tuple(result)


def _forward_reads(flat: FlatProblem, ends: Sequence[int]) -> list[set[int]]:
    number, result = 0, [set[int]() for _ in flat.size]
    for op in range(ends[-1]):
        number += op == ends[number]
        for value in flat.inputs[op]:
            result[value].add(number)
    return result


def _stages(
    flat: FlatProblem, block: Sequence[int], forward: Sequence[set[int]], turn: int, count: int
) -> tuple[int, ...]:
    """Each block's stage begins at the first op, not before the stage of the block after it, that needs the block.

    An op needs the block whose inner values it reads, and every block whose inputs it reads. What the first op of
    backward reads is in memory then.
    """
    needs: list[list[int]] = [[] for _ in range(count)]
    for op in range(turn + 1, flat.count):
        for value in flat.inputs[op]:
            if block[value] != NEVER:
                later = [number for number in forward[value] if number > block[value]]
                for number in later or [block[value]]:
                    needs[number].append(op)
    result, start = [NEVER] * count, turn
    result[-1] = turn
    for number in reversed(range(count - 1)):
        found = next((op for op in needs[number] if op >= start), NEVER)
        if found != NEVER:
            result[number] = start = found
    return tuple(result)


def _all_reads(
    flat: FlatProblem, stages: Sequence[int], block: Sequence[int], forward: Sequence[set[int]], turn: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[bool, ...]]:
    reads, saved = [set(blocks) for blocks in forward], [False] * len(flat.size)
    begins: dict[int, int] = {}
    for number, stage in enumerate(stages):
        if stage != NEVER:
            begins.setdefault(stage, number)
    stage = len(stages) - 1
    for op in range(turn, flat.count):
        stage = begins.get(op, stage)
        for value in flat.inputs[op]:
            reads[value].add(stage)
            saved[value] = saved[value] or stage <= block[value]
    return tuple(tuple(sorted(blocks)) for blocks in reads), tuple(saved)
