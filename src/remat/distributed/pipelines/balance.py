"""Where to cut a chain of blocks into stages: so that the slowest stage is as fast as it can be, within its memory.

In: blocks that run one after another, a micro-batch, and how many stages there are. Each block is captured and measured
by itself: its time, what it saves, and what it must save. Out: the blocks of each stage. A stage that does not fit
as it is computes blocks again, those first that free most for their time; so a stage with more micro-batches in flight
gets fewer blocks, or cheaper ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from remat.core.budget import BudgetUnit, parse_budget
from remat.distributed.pipelines.actions import in_flight, orders_of
from remat.distributed.pipelines.rank_memory import StageNeeds
from remat.distributed.pipelines.stage_problem import StageProblem
from remat.distributed.pipelines.stage_session import captured_stage, stage_module
from remat.errors import BudgetError, InfeasibleBudget, RematError
from remat.pytorch._compat import pipelining
from remat.pytorch.resident.memory import ResidentMemory

SEARCH_S = 1.0
"""For what a block has to save."""


@dataclass(frozen=True, slots=True)
class ChainBlock:
    """One block for one micro-batch."""

    needs: StageNeeds
    least_saved_bytes: int
    resident_bytes: int
    """Parameters, gradients and optimizer state."""

    @property
    def time_ns(self) -> float:
        return self.needs.forward_ns + self.needs.backward_ns

    @property
    def work_bytes(self) -> int:
        """While it runs, beyond what it saves."""
        return max(self.needs.forward_peak_bytes, self.needs.backward_peak_bytes) - self.needs.saved_bytes


@dataclass(frozen=True, slots=True)
class Balanced:
    ends: tuple[int, ...]
    """For each stage, the block before which the next one begins."""
    time_ns: tuple[float, ...]
    """For each stage, forward and backward of a micro-batch, with what is computed again."""

    def stages(self, blocks: Sequence[nn.Module]) -> list[nn.Sequential]:
        starts = (0, *self.ends)
        return [nn.Sequential(*blocks[start:end]) for start, end in zip(starts, self.ends, strict=False)]


def balance(
    blocks: Sequence[nn.Module],
    *args: Any,
    stages: int,
    micro_batches: int,
    budget: str | int | None = None,
    schedule: str = "1F1B",
    state_per_parameter: int = 2,
) -> Balanced:
    """Cut `blocks` for a micro-batch `args` of the first; `budget` is of each rank, in bytes or as "8GiB".

    `schedule` is one of torch's with one stage a rank, "1F1B" or "GPipe". An optimizer keeps as many times the bytes
    of the parameters as `state_per_parameter` says: AdamW two.
    """
    if not 1 <= stages <= len(blocks):
        raise RematError(f"{len(blocks)} blocks cannot be cut into {stages} stages; give 1 to {len(blocks)}.")
    allowed = math.inf if budget is None else _bytes_of(budget)
    orders = orders_of(pipelining.orders_of_kind(schedule, stages, micro_batches))
    waiting = [in_flight(orders[rank])[rank] for rank in range(stages)]
    return cut([*_measured(blocks, args, state_per_parameter)], waiting, allowed)


def _bytes_of(budget: str | int) -> float:
    parsed = parse_budget(budget)
    if parsed.unit is not BudgetUnit.BYTES:
        raise BudgetError(f"The budget {budget} of a stage is not known before it is cut; give bytes, as 8GiB.")
    return parsed.amount


def _measured(blocks: Sequence[nn.Module], args: tuple[Any, ...], state: int) -> Iterator[ChainBlock]:
    for number, block in enumerate(blocks):
        _, session, runner = stage_module(block, ResidentMemory(block))
        variant = captured_stage(session, runner, args, {}, f"Block {number}")
        stage = StageProblem(variant.captured, variant.costs(), is_last=number == len(blocks) - 1)
        needs = stage.needs(stage.plain())
        parameters = sum(item.numel() * item.element_size() for item in block.parameters())
        least = min(needs.saved_bytes, stage.least_saved_bytes("auto", SEARCH_S))
        yield ChainBlock(needs, least, (2 + state) * parameters)
        with torch.no_grad():
            output = block(*args)
        args = tuple(_as_received(item) for item in (output if isinstance(output, tuple) else (output,)))


def _as_received(item: Any) -> Any:
    return item.detach().requires_grad_(item.is_floating_point()) if isinstance(item, torch.Tensor) else item


def cut(blocks: Sequence[ChainBlock], waiting: Sequence[int], allowed_bytes: float) -> Balanced:
    """The cut whose slowest stage is the fastest; `waiting` micro-batches are in flight in each stage."""

    @cache
    def time(start: int, end: int, stage: int) -> float:
        return stage_time_ns(blocks[start:end], waiting[stage], allowed_bytes)

    @cache
    def best(start: int, stage: int) -> tuple[float, tuple[int, ...]]:
        """The slowest of the stages from here on, and their ends."""
        left = len(waiting) - stage - 1
        if left == 0:
            return time(start, len(blocks), stage), (len(blocks),)
        found = []
        for end in range(start + 1, len(blocks) - left + 1):
            later, ends = best(end, stage + 1)
            found.append((max(time(start, end, stage), later), (end, *ends)))
        return min(found)

    slowest, ends = best(0, 0)
    if slowest == math.inf:
        raise InfeasibleBudget(
            f"No cut of {len(blocks)} blocks into {len(waiting)} stages fits the budget of {allowed_bytes:.0f} bytes a "
            "rank; raise the budget, or take more stages or smaller micro-batches.",
            min_budget=int(allowed_bytes) + 1,
        )
    starts = (0, *ends)
    return Balanced(
        ends, tuple(time(start, end, stage) for stage, (start, end) in enumerate(zip(starts, ends, strict=False)))
    )


def stage_time_ns(blocks: Sequence[ChainBlock], waiting: int, allowed_bytes: float) -> float:
    """Of a micro-batch in a stage of these blocks, the cheapest computed again; infinite where that does not fit."""
    base = sum(block.time_ns for block in blocks)
    saved = sum(block.needs.saved_bytes for block in blocks)
    fixed = sum(block.resident_bytes for block in blocks) + max(block.work_bytes for block in blocks)
    excess = fixed + waiting * saved - allowed_bytes
    if excess <= 0:
        return base
    # What one block gives up it needs again while it goes back: its own room, once.
    drops = [(block.needs.forward_ns, block.needs.saved_bytes - block.least_saved_bytes) for block in blocks]
    excess += max(size for _, size in drops)
    for again, size in sorted((item for item in drops if item[1] > 0), key=lambda item: item[0] / item[1]):
        share = min(1.0, excess / (waiting * size))
        base, excess = base + share * again, excess - share * waiting * size
        if excess <= 0:
            return base
    return math.inf
