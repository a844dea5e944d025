"""Tensors on a disk, as a `Store`: through pieces of pinned host memory, by threads that write and threads that read.

A tensor goes out in pieces. Each is copied to host memory by the device's engine, and a thread writes it when it is
there: the device's memory is free as soon as that of a `HostStore` would be. On the way back a thread reads a piece and
has it copied; `wait_back` makes the host wait for the disk, as nothing else can. There is only so much host memory for
pieces on their way: where all of it is, `copy_out` waits for the disk.

Room is reserved before anything is copied, so that a full disk is an `OffloadFailed` of `copy_out`, with nothing lost.
A piece that cannot be written stays in memory, and the next copy out tells why; one that cannot be read is lost, and
`wait_back` tells.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from remat.core.budget import format_bytes
from remat.errors import OffloadFailed
from remat.pytorch.host.engines import Engines, Moment, engines_of
from remat.pytorch.host.memory import HostMemory
from remat.pytorch.host.space import Range, Space, aligned
from remat.pytorch.host.store import Strided, Ticket, as_stored
from remat.pytorch.host.unnamed_file import UnnamedFile

EXTENT_BYTES = 256 * 2**20
PIECE_BYTES = 8 * 2**20
PIECES = 16
"""On their way at one time, both directions together."""
THREADS = 4
"""For each direction: what a disk needs to be asked at once to be fast."""


@dataclass(slots=True, eq=False)
class _Piece:
    """Some bytes of a tensor."""

    begin: int
    size_bytes: int
    offset: int
    """In the file."""
    written: Future[None] | None = None
    kept: torch.Tensor | None = None
    """What could not be written."""


class DiskStore:
    """A file of one folder's disk as a `Store`; `budget_bytes` is the most that the file grows to."""

    def __init__(self, device: torch.device, folder: Path, budget_bytes: int | None = None) -> None:
        self._engines: Engines = engines_of(device)
        self._file = UnnamedFile(folder)
        self._budget_bytes = budget_bytes
        self._space = Space()
        self._begins: dict[int, int] = {}
        """Of extents, in the file."""
        self._staging = _Staging(device)
        self._writers = ThreadPoolExecutor(THREADS, "remat-write")
        self._readers = ThreadPoolExecutor(THREADS, "remat-read")
        self._failure: OffloadFailed | None = None

    @property
    def used_bytes(self) -> int:
        return self._space.total_bytes - self._space.free_bytes

    @property
    def total_bytes(self) -> int:
        """What is reserved on the disk; it stays for the next step."""
        return self._space.total_bytes

    def copy_out(self, tensor: torch.Tensor) -> DiskTicket:
        self._check()
        tensor = as_stored(tensor)
        like = Strided.of(tensor)
        place = self._take(like.size_bytes)
        ticket = DiskTicket(self, like, place, self._pieces(place, like.size_bytes))
        self.copy_over(ticket, tensor)
        return ticket

    def copy_over(self, ticket: Ticket, tensor: torch.Tensor) -> None:
        self._check()
        found = _own(ticket)
        found.finish()
        source = found.like.flat(as_stored(tensor))
        content, copied = source.view(torch.uint8), None
        for piece in found.pieces:
            block = self._staging.take()
            copied = self._engines.send(_part(content, piece), block[: piece.size_bytes])
            piece.written = self._writers.submit(self._write, piece, block, copied)
        found.out(source, copied)

    def copy_back(self, ticket: Ticket) -> torch.Tensor:
        found = _own(ticket)
        target = found.like.empty(self._engines.device)
        content, now = target.view(torch.uint8), self._engines.now()
        reads = [self._readers.submit(self._read, piece, _part(content, piece), now) for piece in found.pieces]
        found.back(target, reads)
        return found.like.shaped(target)

    def peek(self, ticket: Ticket) -> torch.Tensor:
        found = _own(ticket)
        content = torch.empty(found.like.size_bytes, dtype=torch.uint8)
        for piece in found.pieces:
            self._bring(piece, _part(content, piece).copy_)
        return found.like.shaped(content.view(found.like.dtype))

    def release(self, ticket: Ticket) -> None:
        found = _own(ticket)
        place, found.place = found.place, None
        if place is not None:
            found.finish()
            self._space.give_back(place)

    def wait(self, moment: Moment) -> None:
        self._engines.wait(moment)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _take(self, size_bytes: int) -> Range:
        found = self._space.take(size_bytes)
        if found is None:
            wanted = aligned(size_bytes)
            self._grow(wanted)
            found = self._space.take(wanted)
        assert found is not None, "a new extent has room for what it was made for"
        return found

    def _grow(self, wanted: int) -> None:
        room = 2**62 if self._budget_bytes is None else self._budget_bytes - self._space.total_bytes
        if room < wanted:
            raise OffloadFailed(
                f"{format_bytes(wanted)} more were to go to {self._file.folder}, and {format_bytes(self.used_bytes)} "
                f"of its budget of {format_bytes(self._budget_bytes or 0)} are in use; raise the budget or offload "
                "less."
            )
        size = max(wanted, min(EXTENT_BYTES, aligned(room + 1) - aligned(1)))
        try:
            begin = self._file.grow(size)
        except OffloadFailed:
            size = wanted
            begin = self._file.grow(size)
        self._begins[self._space.add_extent(size)] = begin

    def _pieces(self, place: Range, size_bytes: int) -> tuple[_Piece, ...]:
        offset = self._begins[place.extent] + place.offset
        begins = range(0, size_bytes, PIECE_BYTES)
        return tuple(_Piece(begin, min(PIECE_BYTES, size_bytes - begin), offset + begin) for begin in begins)

    def _write(self, piece: _Piece, block: torch.Tensor, copied: Moment) -> None:
        """In a writer's thread."""
        try:
            self._engines.finish(copied)
            self._file.write(_memory(block, piece), piece.offset)
            piece.kept = None
        except OffloadFailed as error:
            piece.kept = block[: piece.size_bytes].clone()
            self._failure = error
        finally:
            self._staging.give_back(block)

    def _read(self, piece: _Piece, target: torch.Tensor, now: Moment) -> None:
        """In a reader's thread."""
        self._bring(piece, lambda source: self._engines.finish(self._engines.fetch(source, target, now)))

    def _bring(self, piece: _Piece, take: Callable[[torch.Tensor], Any]) -> None:
        """Hand the bytes of a piece to `take`, in the calling thread."""
        assert piece.written is not None
        piece.written.result()
        if piece.kept is not None:
            take(piece.kept)
            return
        block = self._staging.take()
        try:
            self._file.read(_memory(block, piece), piece.offset)
            take(block[: piece.size_bytes])
        finally:
            self._staging.give_back(block)


class DiskTicket:
    """Where a tensor lies on the disk, and what its copies still hold of the device's memory."""

    __slots__ = ("_copied", "_reads", "_source", "_store", "_target", "like", "pieces", "place")

    def __init__(self, store: DiskStore, like: Strided, place: Range, pieces: tuple[_Piece, ...]) -> None:
        self.place: Range | None = place
        self.like, self.pieces = like, pieces
        self._copied: Moment = None
        self._store = store
        self._source: torch.Tensor | None = None
        self._target: torch.Tensor | None = None
        self._reads: list[Future[None]] = []

    def wait_out(self) -> None:
        if self._source is not None and self.pieces:
            self._store.wait(self._copied)
        self._source = None

    def wait_back(self) -> None:
        """The host waits for the disk; raises `OffloadFailed` where what was written cannot be read."""
        reads, self._reads = self._reads, []
        wait_for(reads)
        self._target = None
        for read in reads:
            read.result()

    def out(self, source: torch.Tensor, copied: Moment) -> None:
        self._source, self._copied = source, copied

    def back(self, target: torch.Tensor, reads: list[Future[None]]) -> None:
        wait_for(self._reads)
        self._target, self._reads = target, reads

    def finish(self) -> None:
        """Wait until no thread uses the ticket's bytes."""
        self.wait_out()
        wait_for([*self._reads, *(piece.written for piece in self.pieces if piece.written is not None)])
        self._target, self._reads = None, []

    def __del__(self) -> None:
        if self.place is not None:
            self._store.release(self)


class _Staging:
    """Blocks of host memory for pieces on their way."""

    def __init__(self, device: torch.device) -> None:
        memory = HostMemory(device, PIECES * PIECE_BYTES)
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(PIECES):
            self._free.put(memory.tensor(memory.take(PIECE_BYTES), torch.uint8, PIECE_BYTES))
        self._memory = memory

    def take(self) -> torch.Tensor:
        """Waits until there is one."""
        return self._free.get()

    def give_back(self, block: torch.Tensor) -> None:
        self._free.put(block)


def _own(ticket: Ticket) -> DiskTicket:
    assert isinstance(ticket, DiskTicket), "a ticket of this store"
    return ticket


def _part(content: torch.Tensor, piece: _Piece) -> torch.Tensor:
    return content[piece.begin : piece.begin + piece.size_bytes]


def _memory(block: torch.Tensor, piece: _Piece) -> memoryview:
    """The pages of a block that a piece takes."""
    return memoryview(block.numpy())[: aligned(piece.size_bytes)]
