"""While ranks plan, each looks whether the others are still there, and stops at once when one is not.

In: ranks that talk over a store, and a stretch of work of this one that others wait for, or that needs them all. Out:
the work, or `RankLost` within about a second, whatever it was at: capture and search take minutes and ask nobody.
Every rank looks at the processes of its own machine and says which it misses, so that ranks of other machines know it.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from types import TracebackType

from remat.distributed.agreement.processes import Neighbours
from remat.distributed.agreement.ranks import Interruption, Ranks, ended_early, without_store
from remat.errors import RankLost, RematError

LOOK_S = 1.0
"""How often it is looked for the others."""
AGAIN_S = 1.0
"""After how long work that did not stop is stopped again: libraries catch what they do not know."""
CLOSE_S = 10.0
"""How long an answer of the store is waited for when the work is over."""


class Vigil:
    """A stretch of work in which a rank that ends is noticed."""

    def __init__(self, peers: Ranks) -> None:
        self._peers = peers
        self._neighbours = Neighbours(peers.job or peers.store)
        self._worker = threading.get_ident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look_around, daemon=True)
        self._lost: RankLost | None = None

    def __enter__(self) -> None:
        self._peers.attend(True)
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while not self._is_closed():
            # It was stopped while it closed.
            pass
        if self._lost and not isinstance(error, RematError):
            raise self._lost from (None if isinstance(error, Interruption) else error)

    def _is_closed(self) -> bool:
        try:
            self._done.set()
            self._thread.join(CLOSE_S)
            _stop(self._worker, None)
            with contextlib.suppress(RuntimeError):
                # Where the store is gone nobody reads it.
                self._peers.attend(False)
        except Interruption:
            return False
        return True

    def _look_around(self) -> None:
        while not self._done.wait(LOOK_S):
            try:
                self._peers.beat()
                gone = self._gone()
            except RuntimeError as error:
                self._lost = without_store(error)
            else:
                self._lost = RankLost(f"{ended_early(gone)}; see why, and start all ranks again.") if gone else None
            if self._lost:
                self._stop_work()
                return

    def _gone(self) -> list[int]:
        """Members that have ended, in a stretch like this one or before they came to it."""
        ended = {rank for rank in self._neighbours.ended() if rank in self._peers.members}
        missed = sorted(rank for rank in ended if self._peers.is_awaited(rank))
        if missed:
            self._peers.tell_missed(missed)
        return missed or self._peers.told_missed()

    def _stop_work(self) -> None:
        while not self._done.is_set():
            _stop(self._worker, Interruption)
            self._done.wait(AGAIN_S)


def _stop(thread: int, kind: type[BaseException] | None) -> None:
    """Raise `kind` in a thread as soon as it runs Python again; None takes back what was not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind) if kind else None)
