"""Where the bytes of a followed step come from: the storages themselves, or what an allocator says besides.

A ledger is told before and after every op. In the end it gets every storage that was seen and answers with an
`Account`: what was in memory at each op, and from which op to which each storage was there. `StorageLedger` knows no
more than the storages (fake tensors); `CudaLedger` reads the caching allocator's counters; `cpu_ledger.py` has every
allocation and free on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch

from remat.core.results.profile import BEFORE
from remat.pytorch.cuda_peak import CudaPeak
from remat.pytorch.device import storage_bytes


@dataclass(slots=True)
class SeenStorage:
    """What following tells of a storage's life."""

    size_bytes: int
    address: int
    first_op: int
    """The op that made it or met it first; `BEFORE` for what was there."""
    is_result: bool
    last_op: int | None = None
    """The last op that had begun when it died; None while it lives."""
    died_inside: bool = False
    """Whether that op was still running."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes from the op that allocates them to the one after which they are gone."""

    size_bytes: int
    created: int
    freed: int


@dataclass(frozen=True, slots=True)
class Account:
    start_bytes: int
    live_bytes: list[int]
    workspace_bytes: list[int]
    allocated_bytes: list[int]
    freed_bytes: list[int]
    spans: list[Span | None]
    """One for each storage seen; None where it takes nothing from the allocator."""
    others: list[Span]
    """What is no tensor's that was seen."""
    reserved_bytes: int = 0


class Ledger(Protocol):
    def size_of(self, tensor: torch.Tensor) -> int:
        """What the tensor's storage takes; 0 where it lies on another device."""

    def address_of(self, storage: Any) -> int:
        """Tells apart memory that a storage has one after the other."""

    def start(self) -> None: ...

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def stop(self) -> None:
        """The step is over; called in the thread that called `start`."""

    def account(self, seen: Sequence[SeenStorage], op_count: int) -> Account: ...


class StorageLedger:
    """Nothing but the storages: for fake tensors, and where no allocator can be asked."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def size_of(self, tensor: torch.Tensor) -> int:
        return storage_bytes(tensor, self.device)

    def address_of(self, storage: Any) -> int:
        return 0

    def start(self) -> None:
        pass

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def account(self, seen: Sequence[SeenStorage], op_count: int) -> Account:
        spans = [_span(item, op_count) for item in seen]
        allocated, freed = _flows(spans, op_count)
        return Account(
            start_bytes=sum(span.size_bytes for span in spans if span.created == BEFORE),
            live_bytes=levels(spans, op_count),
            workspace_bytes=[0] * op_count,
            allocated_bytes=allocated,
            freed_bytes=freed,
            spans=list(spans),
            others=[],
        )


class CudaLedger(StorageLedger):
    """The caching allocator's counters, read around every op; what they know beyond the storages is `other`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._peak = CudaPeak(device)
        self._at_start = _Counters(0, 0, 0, 0, 0)
        self._begins: list[_Counters] = []
        self._ends: list[_Counters] = []

    def start(self) -> None:
        torch.cuda.synchronize(self.device)
        self._peak.open()
        self._at_start = self._read()

    def begin(self) -> None:
        self._begins.append(self._read())

    def end(self) -> None:
        self._ends.append(self._read())

    def stop(self) -> None:
        self._begins.append(self._read())
        self._peak.close()

    def account(self, seen: Sequence[SeenStorage], op_count: int) -> Account:
        spans = [self._found(item, op_count) for item in seen]
        known = levels(spans, op_count)
        live = [counters.current for counters in self._ends]
        for item in seen:
            if item.died_inside and item.last_op is not None:
                live[item.last_op] += item.size_bytes
        live = [max(total, part) for total, part in zip(live, known, strict=True)]
        known_before = sum(span.size_bytes for span in spans if span.created == BEFORE)
        rest = [total - part for total, part in zip(live, known, strict=True)]
        return Account(
            start_bytes=max(self._at_start.current, known_before),
            live_bytes=live,
            workspace_bytes=[max(0, peak - held) for peak, held in zip(self._peaks(), live, strict=True)],
            allocated_bytes=self._allocated(op_count),
            freed_bytes=[
                after.freed - before.freed for before, after in zip(self._begins, self._begins[1:], strict=False)
            ],
            spans=list(spans),
            others=_staircase(max(0, self._at_start.current - known_before), rest),
            reserved_bytes=max(item.reserved for item in (*self._begins, *self._ends)),
        )

    def _found(self, item: SeenStorage, op_count: int) -> Span:
        """A storage first met as an argument was made just before, if as much was; otherwise it was there all along."""
        span = _span(item, op_count)
        if item.is_result or item.first_op == BEFORE:
            return span
        before = self._ends[item.first_op - 1] if item.first_op else self._at_start
        if self._begins[item.first_op].allocated - before.allocated >= item.size_bytes:
            return Span(item.size_bytes, item.first_op, span.freed)
        return span

    def _peaks(self) -> list[int]:
        """The most in memory while each op ran, or just before it where something was allocated there."""
        before = [self._at_start, *self._ends]
        gaps = zip(before, self._begins, strict=False)
        rises = [begin.peak if begin.peak > end.current else 0 for end, begin in gaps]
        return [max(item.peak, rise) for item, rise in zip(self._ends, rises, strict=False)]

    def _allocated(self, op_count: int) -> list[int]:
        marks = [self._at_start.allocated, *(counters.allocated for counters in self._ends)]
        return [marks[place + 1] - marks[place] for place in range(op_count)]

    def _read(self) -> _Counters:
        """The peak is that since the last reading."""
        found = torch.cuda.memory_stats_as_nested_dict(self.device)
        count, reserved = found["allocated_bytes"]["all"], found["reserved_bytes"]["all"]["peak"]
        return _Counters(count["current"], self._peak.take(), count["allocated"], count["freed"], reserved)


@dataclass(frozen=True, slots=True)
class _Counters:
    current: int
    peak: int
    allocated: int
    """All that was ever handed out."""
    freed: int
    reserved: int


def _span(item: SeenStorage, op_count: int) -> Span:
    created = item.first_op if item.is_result else BEFORE
    return Span(item.size_bytes, created, op_count if item.last_op is None else item.last_op)


def levels(spans: Sequence[Span], op_count: int) -> list[int]:
    """Bytes in memory at each op."""
    change = [0] * (op_count + 2)
    for span in spans:
        change[max(0, span.created)] += span.size_bytes
        change[min(max(span.freed, span.created) + 1, op_count + 1)] -= span.size_bytes
    return list(accumulate(change))[:op_count]


def _flows(spans: Sequence[Span], op_count: int) -> tuple[list[int], list[int]]:
    """Bytes that come with each op and go after it."""
    allocated, freed = [0] * op_count, [0] * op_count
    for span in spans:
        if span.created != BEFORE:
            allocated[span.created] += span.size_bytes
        if 0 <= span.freed < op_count:
            freed[span.freed] += span.size_bytes
    return allocated, freed


def _staircase(before: int, heights: Sequence[int]) -> list[Span]:
    """Spans that add up to `heights`; what came last goes first."""
    stack: list[tuple[int, int]] = [(BEFORE, before)] if before else []
    found: list[Span] = []
    level = before
    for position, height in enumerate(heights):
        if height > level:
            stack.append((position, height - level))
        while level > height:
            created, size = stack.pop()
            gone = min(size, level - height)
            found.append(Span(gone, created, position - 1))
            if size > gone:
                stack.append((created, size - gone))
            level -= gone
        level = height
    return [*found, *(Span(size, created, len(heights)) for created, size in stack)]
