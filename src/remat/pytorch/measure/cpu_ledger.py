"""Every byte of a followed step on the CPU, from the profiler: nothing is missed, inside kernels or outside of ops.

The profiler's allocations become blocks. A block that a storage lies in is that storage's; another one is its op's
workspace if it is gone before the next op begins, and `other` if it stays. What happens between two ops counts so: an
allocation belongs to the op that follows, a free to the op before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remat.core.results.profile import BEFORE
from remat.pytorch._compat.memory import AllocationProfiler, CpuEvents, cpu_events, op_range
from remat.pytorch.measure.ledger import Account, SeenStorage, Span, StorageLedger, levels

_RANGE = "remat: op"


class CpuLedger(StorageLedger):
    """Belongs to the thread that starts it, which is also the one that runs backward on a CPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._profiler = AllocationProfiler()
        self._range: Any = None
        self.events = CpuEvents([], [])
        """What the account is made from."""

    def address_of(self, storage: Any) -> int:
        return int(storage.data_ptr())

    def start(self) -> None:
        self._profiler.start()

    def begin(self) -> None:
        self._range = op_range(_RANGE)
        self._range.__enter__()

    def end(self) -> None:
        self._range.__exit__(None, None, None)

    def stop(self) -> None:
        self._profiler.stop()
        self.events = cpu_events(self._profiler, _RANGE)

    def account(self, seen: Sequence[SeenStorage], op_count: int) -> Account:
        books = _Books(self.events)
        if books.op_count != op_count:
            raise RuntimeError(f"The profiler saw {books.op_count} of the step's {op_count} ops.")
        return books.close(seen)


@dataclass(slots=True)
class _Block:
    """One allocation with its free."""

    size_bytes: int
    created: int
    freed: int
    leaves_op: bool
    """Whether it is there when the op that made it is over."""
    is_seen: bool = False

    @property
    def is_workspace(self) -> bool:
        return not self.leaves_op or (not self.is_seen and self.freed <= self.created)


class _Books:
    def __init__(self, events: CpuEvents) -> None:
        self._starts = [start for start, _ in events.ranges]
        self._ends = [end for _, end in events.ranges]
        self._events = events.allocations
        self.op_count = len(events.ranges)
        self._blocks: list[_Block] = []
        self._by_address: dict[int, list[_Block]] = defaultdict(list)
        self._strangers: dict[int, int] = {}
        """For addresses that were handed out before the step: the op after which they were freed."""
        self._residents: dict[int, Span] = {}

    def close(self, seen: Sequence[SeenStorage]) -> Account:
        self._find_blocks()
        spans = [self._match(item) for item in seen]
        self._add_silent_frees()
        held = [block for block in self._blocks if not block.is_workspace]
        live = levels([*map(_as_span, held), *self._residents.values()], self.op_count)
        start = sum(span.size_bytes for span in self._residents.values())
        peaks, allocated, freed = self._pass(start)
        return Account(
            start_bytes=start,
            live_bytes=live,
            workspace_bytes=[max(0, peak - total) for peak, total in zip(peaks, live, strict=True)],
            allocated_bytes=allocated,
            freed_bytes=freed,
            spans=spans,
            others=[_as_span(block) for block in held if not block.is_seen and block.created < self.op_count],
        )

    def _find_blocks(self) -> None:
        alive: dict[int, _Block] = {}
        for moment, address, size in self._events:
            if size > 0:
                created = bisect_right(self._ends, moment)
                block = alive[address] = _Block(size, created, self.op_count, leaves_op=True)
                self._blocks.append(block)
                self._by_address[address].append(block)
            elif address in alive:
                block = alive.pop(address)
                block.freed = bisect_right(self._starts, moment) - 1
                block.leaves_op = block.created < self.op_count and moment > self._ends[block.created]
            else:
                self._strangers.setdefault(address, bisect_right(self._starts, moment) - 1)

    def _match(self, item: SeenStorage) -> Span | None:
        """The block that a storage lies in; without one it was there before, or is none of the allocator's."""
        if item.first_op != BEFORE:
            for block in reversed(self._by_address.get(item.address, ())):
                if block.created <= item.first_op <= block.freed and not block.is_seen:
                    block.is_seen = True
                    return None if block.is_workspace else _as_span(block)
        if item.is_result or item.address in self._residents:
            return None
        span = self._residents[item.address] = Span(item.size_bytes, BEFORE, self._last_op(item))
        return span

    def _last_op(self, item: SeenStorage) -> int:
        if item.address in self._strangers:
            return self._strangers[item.address]
        return self.op_count if item.last_op is None else item.last_op

    def _add_silent_frees(self) -> None:
        """Memory of another owner, as numpy's, goes without a word of the allocator."""
        silent = [
            (self._ends[span.freed] if span.freed != BEFORE else 0, address, -span.size_bytes)
            for address, span in self._residents.items()
            if address not in self._strangers and span.freed < self.op_count
        ]
        if silent:
            self._events = sorted([*self._events, *silent], key=lambda event: event[0])

    def _pass(self, start: int) -> tuple[list[int], list[int], list[int]]:
        """For each op: the most in memory from the op before to its end, what was allocated, what was freed."""
        peaks, allocated, freed = ([0] * self.op_count for _ in range(3))
        current = start
        alive: dict[int, int] = {address: span.size_bytes for address, span in self._residents.items()}
        for moment, address, size in self._events:
            window, op = bisect_right(self._ends, moment), bisect_right(self._starts, moment) - 1
            if size > 0:
                alive[address] = size
                current += size
                if window < self.op_count:
                    peaks[window] = max(peaks[window], current)
                    allocated[window] += size
            else:
                gone = alive.pop(address, 0)
                current -= gone
                if op >= 0:
                    freed[op] += gone
        return peaks, allocated, freed


def _as_span(block: _Block) -> Span:
    return Span(block.size_bytes, block.created, block.freed)
