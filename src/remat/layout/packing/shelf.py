"""Memory that is filled one buffer after the other, each into a gap that is free for its whole life.

What is placed is kept in order of offset in arrays, so that the gaps a buffer sees are found by a few passes of numpy
over everything placed: tens of microseconds for thousands of buffers, and nothing to set up.
"""

from __future__ import annotations

import numpy as np

from remat.layout.problem import Buffer

_FAR = 2**62


class Shelf:
    def __init__(self, room: int) -> None:
        """`room` is the number of buffers that will come."""
        self._columns = np.empty((4, room), dtype=np.int64)
        self._count = 0

    def lowest_gap(self, buffer: Buffer) -> int:
        """The lowest offset at which `buffer` fits."""
        starts, ends = self._gaps(buffer)
        return int(starts[np.argmax(ends - starts >= buffer.size)])

    def tightest_gap(self, buffer: Buffer) -> int:
        """The offset of the smallest gap into which `buffer` fits; on top of everything where there is none."""
        starts, ends = self._gaps(buffer)
        rooms = ends - starts
        return int(starts[np.argmin(np.where(rooms >= buffer.size, rooms, _FAR + 1))])

    def put(self, buffer: Buffer, offset: int) -> None:
        count, columns = self._count, self._columns
        place = int(np.searchsorted(columns[0, :count], offset))
        columns[:, place + 1 : count + 1] = columns[:, place:count]
        columns[:, place] = (offset, offset + buffer.size, buffer.lower, buffer.upper)
        self._count += 1

    def _gaps(self, buffer: Buffer) -> tuple[np.ndarray, np.ndarray]:
        """Where the gaps that `buffer` sees begin (aligned for it) and end; the last one never ends."""
        offsets, tops, lowers, uppers = self._columns[:, : self._count]
        alive = np.flatnonzero((lowers < buffer.upper) & (uppers > buffer.lower))
        starts = np.zeros(len(alive) + 1, dtype=np.int64)
        # A low buffer may reach above a later one's offset where both meet this one but not each other.
        np.maximum.accumulate(tops[alive], out=starts[1:])
        if buffer.alignment > 1:
            starts = -(-starts // buffer.alignment) * buffer.alignment
        return starts, np.append(offsets[alive], _FAR)
