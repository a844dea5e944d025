"""While ranks plan, each looks whether the others are still there, and stops at once when one is not.

In: ranks that talk over a store, and a stretch of work of this one that others wait for, or that needs them all. Out:
the work, or `RankLost` within about a second, whatever it was at: capture and search take minutes and ask nobody.
Every rank looks at the processes of its own machine and says which it misses, so that ranks of other machines know it;
the first listens for signs of life from all, which stopped ranks do not give.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from types import TracebackType

from remat.distributed.agreement.processes import Neighbours
from remat.distributed.agreement.ranks import Interruption, Ranks, Silence, ended_early, named, without_store
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
        try:
            self._thread.start()
        except Interruption as error:
            # On a busy machine somebody is missed before this thread has gone on.
            self.__exit__(Interruption, error, None)

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
        silence = Silence(self._peers, time.monotonic())
        while not self._done.wait(LOOK_S):
            try:
                self._peers.beat()
                gone = self._ended() or self._silent(silence) or self._peers.told_missed()
            except RuntimeError as error:
                self._lost = without_store(error)
            else:
                self._lost = RankLost(f"{gone}; see why, and start all ranks again.") if gone else None
            if self._lost:
                self._stop_work()
                return

    def _ended(self) -> str:
        """Who has ended in a stretch like this one, or before it came to it."""
        ended = sorted(rank for rank in self._neighbours.ended() if rank in self._peers.members)
        missed = [rank for rank in ended if self._peers.is_awaited(rank)]
        return self._told(ended_early(missed)) if missed else ""

    def _silent(self, silence: Silence) -> str:
        """The first listens to all, and they to it: a thousand ranks do not ask for each other."""
        members = self._peers.members
        places = range(1, len(members)) if self._peers.place == 0 else (0,)
        late = [members[place] for place in places if silence.is_too_long(place)]
        missed = [rank for rank in late if self._peers.is_awaited(rank)]
        words = f"not heard of for {self._peers.timeout_s:.0f} s before this step could be planned"
        return self._told(f"{named(missed)} {'was' if len(missed) == 1 else 'were'} {words}") if missed else ""

    def _told(self, sentence: str) -> str:
        self._peers.tell_missed(sentence)
        return sentence

    def _stop_work(self) -> None:
        while not self._done.is_set():
            _stop(self._worker, Interruption)
            self._done.wait(AGAIN_S)


def _stop(thread: int, kind: type[BaseException] | None) -> None:
    """Raise `kind` in a thread as soon as it runs Python again; None takes back what was not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind) if kind else None)
