"""Ranks that talk over a store: a meeting of all of them, and answers that one finds for everybody.

In: a key-value store (`torch.distributed.Store`), this rank's place among its peers and how long a silent rank is
waited for. Nothing here is a collective, so nothing runs into a collective's timeout. A meeting costs each rank one
write and one read, and the first as many reads as there are ranks; an answer costs each rank one read.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from remat.distributed.agreement.processes import has_ended, process_key
from remat.errors import InfeasibleBudget, RankLost, RematError

SLICE_S = 1.0
"""How long a wait lasts at most before it is looked whether the other rank is still there."""
GRACE_S = 2.0
"""How long the first rank waits for the next one before it compares those that have come."""
PRECEDENCE_S = 1.0
"""How long others leave it to their leader to ask first."""
BEAT_S = 1.0
"""How often a rank that works for the others says that it does."""
LINGER_S = 3.0
"""How long a rank that refuses waits for the others to read it."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
"""Between two looks for what another rank is to write."""
_FIRST_PAUSE_PER_RANK_S, _PAUSE_PER_RANK_S = 0.00002, 0.0005
"""At least, at first and in the end: the more ranks, the less often each of them asks the store."""


class Interruption(BaseException):
    """Stops a thread that plans when a rank is lost; whoever watches it makes a `RankLost` of it."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks that plan together, as one of them sees it."""

    store: Any
    place: int
    """Of this rank among them; the first leads."""
    members: tuple[int, ...]
    """Their numbers in the job."""
    timeout_s: float
    job: Any = None
    """The store in which every rank of the job says which process it is; None where that is the same one."""

    @property
    def own(self) -> int:
        """This rank's number in the job."""
        return self.members[self.place]

    def meet(
        self,
        said: dict[str, Any],
        judge: Callable[[list[dict[str, Any] | None]], dict[str, Any]],
        *,
        since: float | None = None,
    ) -> Any:
        """All ranks say something; the first judges, and all get its verdict.

        `judge` is given what each has said, None for those that have not come, and may say at any time that enough is
        known: by a verdict with a `refused` that is not empty. Who has not come is waited for as long as it is heard
        of, and for the timeout after that, or after the moment `since` when this rank began to get ready.
        """
        number = self.store.add(f"meetings/{self.place}", 1)
        key = f"meeting/{number}"
        if self.place > 0:
            self.store.set(f"{key}/{self.place}", _packed(said))
            return self._heard(f"{key}/verdict", lambda: 0)
        heard: list[dict[str, Any] | None] = [said, *[None] * (len(self.members) - 1)]
        with self._beating():
            verdict = self._judged(key, heard, judge, Silence(self, time.monotonic() if since is None else since))
        self.store.set(f"{key}/verdict", _packed(verdict))
        if verdict["refused"]:
            self._linger(f"{key}/verdict")
        return verdict

    def _has_ended(self, place: int) -> bool:
        store, key = self.job or self.store, process_key(self.members[place])
        return bool(store.check([key])) and has_ended(store.get(key).decode())

    def give_up(self, said: dict[str, Any], sentence: str) -> None:
        """Say to the meeting that is to come that this rank has failed, and wait for nobody."""
        key = f"meeting/{self.store.add(f'meetings/{self.place}', 1)}"
        if self.place > 0:
            self.store.set(f"{key}/{self.place}", _packed(said))
        else:
            self.store.set(f"{key}/verdict", _packed({"refused": sentence, "lost": True}))

    def _judged(
        self,
        key: str,
        heard: list[Any],
        judge: Callable[[list[dict[str, Any] | None]], dict[str, Any]],
        silence: Silence,
    ) -> dict[str, Any]:
        for place in range(1, len(heard)):
            while not self._has_come(f"{key}/{place}", GRACE_S):
                later = (other for other in range(place + 1, len(heard)) if heard[other] is None)
                for other in later:
                    if self.store.check([f"{key}/{other}"]):
                        heard[other] = _unpacked(self.store.get(f"{key}/{other}"))
                if (verdict := judge(heard))["refused"]:
                    return verdict
                absent = [other for other, item in enumerate(heard) if item is None]
                if ended := [self.members[other] for other in absent if self._has_ended(other)]:
                    return {"refused": ended_early(ended), "lost": True}
                if lost := [self.members[other] for other in absent if silence.is_too_long(other)]:
                    return {
                        "refused": f"{named(lost)} did not come to plan this step within {self.timeout_s:.0f} s",
                        "lost": True,
                    }
            heard[place] = heard[place] or _unpacked(self.store.get(f"{key}/{place}"))
        return judge(heard)

    def share(self, key: str, find: Callable[[], Any], *, leader: int, waits: bool = False) -> Any:
        """What `find` returns or raises on one rank, as JSON knows it, on all that ask for `key`.

        The leader finds it; where it does not ask at once, whoever asks first: no rank waits for one that may never
        ask, unless all must do the same and it `waits`.
        """
        claim = f"claim/{key}"
        if self.place != leader:
            self._has_come(claim, self.timeout_s if waits else PRECEDENCE_S)
        if self._asked(lambda: self.store.add(claim, 1)) == 1:
            self.store.set(f"by/{key}", str(self.place))
            return self._told(key, find)
        return answer_of(self._heard(f"answer/{key}", lambda: int(self.store.get(f"by/{key}"))))

    def _told(self, key: str, find: Callable[[], Any]) -> Any:
        with self._beating():
            try:
                found = find()
            except Interruption:
                # Each of them sees by itself who is gone.
                raise
            except BaseException as error:
                self.store.set(f"answer/{key}", _packed(_described(error, self.own)))
                self._linger(f"answer/{key}")
                raise
        self.store.set(f"answer/{key}", _packed({"found": found}))
        return found

    def attend(self, is_there: bool) -> None:
        """Say that this rank does from now on what needs all of them, or that it is done with it."""
        self.store.set(f"attends/{self.own}", str(int(is_there)))

    def is_awaited(self, rank: int) -> bool:
        """Whether a rank has something to do here that it has not begun, or not ended."""
        key = f"attends/{rank}"
        return not self.store.check([key]) or self.store.get(key) == b"1"

    def tell_missed(self, sentence: str) -> None:
        """Say to ranks that cannot see it themselves who is gone."""
        self.store.set("missed", sentence)

    def told_missed(self) -> str:
        return str(self.store.get("missed").decode()) if self.store.check(["missed"]) else ""

    def beat(self) -> None:
        """Say that this rank is at work."""
        self.store.add(f"beats/{self.place}", 1)

    @contextmanager
    def _beating(self) -> Iterator[None]:
        """Say every now and then that this rank is at work, until it is done."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(BEAT_S):
                try:
                    self.beat()
                except RuntimeError:
                    # The store is gone, and with it whoever would listen.
                    return

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _heard(self, key: str, finder: Callable[[], int]) -> Any:
        """What another rank writes under `key`, waited for as long as that rank is heard of."""
        beats, since, patience = -1, time.monotonic(), Patience(len(self.members))
        while not self._has_come(key, SLICE_S, patience):
            now = self._asked(lambda: self.store.add(f"beats/{finder()}", 0))
            if now != beats:
                beats, since = now, time.monotonic()
            if self._asked(lambda: self._has_ended(finder())):
                raise RankLost(
                    f"Rank {self.members[finder()]} was to plan this step for all ranks and has ended; see why, and "
                    "start all ranks again."
                )
            if time.monotonic() - since > self.timeout_s:
                raise RankLost(
                    f"Rank {self.members[finder()]} plans this step for all ranks and has not been heard of for "
                    f"{self.timeout_s:.0f} s; see whether it failed, and start all ranks again."
                )
        said = _unpacked(self._asked(lambda: self.store.get(key)))
        self._asked(lambda: self.store.add(f"{key}/read", 1))
        return said

    def _linger(self, key: str) -> None:
        """Wait a little until others have read a refusal: this process may end now, and the store with it."""
        deadline = time.monotonic() + LINGER_S
        while self.store.add(f"{key}/read", 0) < len(self.members) - 1 and time.monotonic() < deadline:
            time.sleep(_LONGEST_PAUSE_S)

    def _has_come(self, key: str, within_s: float, patience: Patience | None = None) -> bool:
        # Looked for again and again: a wait of the store itself that ends too late is told to the user as an error.
        deadline, patience = time.monotonic() + within_s, patience or Patience(len(self.members))
        while not self._asked(lambda: self.store.check([key])):
            if time.monotonic() > deadline:
                return False
            patience.pause()
        return True

    def _asked(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except RuntimeError as error:
            raise without_store(error) from error


class Patience:
    """Of a rank that looks for something: ever longer between two looks, so that a thousand do not drown the store."""

    def __init__(self, ranks: int) -> None:
        self._pause_s = max(_SHORTEST_PAUSE_S, ranks * _FIRST_PAUSE_PER_RANK_S)
        self._longest_s = max(_LONGEST_PAUSE_S, ranks * _PAUSE_PER_RANK_S)

    def pause(self) -> None:
        time.sleep(self._pause_s)
        self._pause_s = min(1.5 * self._pause_s, self._longest_s)


class Silence:
    """How long ranks have not been heard of."""

    def __init__(self, peers: Ranks, since: float) -> None:
        self._peers, self._since = peers, since
        self._heard: dict[int, tuple[int, float]] = {}

    def is_too_long(self, place: int) -> bool:
        beats, when = self._heard.get(place, (0, self._since))
        now = self._peers.store.add(f"beats/{place}", 0)
        if now != beats:
            beats, when = now, time.monotonic()
        self._heard[place] = beats, when
        return time.monotonic() - when > self._peers.timeout_s


def ended_early(ranks: list[int]) -> str:
    return f"{named(ranks)} ended before this step could be planned"


def without_store(error: RuntimeError) -> RankLost:
    reason = str(error).strip().split("\n")[0]
    return RankLost(
        f"The store that the ranks of this job share does not answer ({reason}): the rank that holds it has ended; see "
        "why, and start all ranks again."
    )


def named(ranks: list[int]) -> str:
    """`Rank 1`, `Ranks 1 and 3`, or the first eight of many."""
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    shown, more = ranks[:8], len(ranks) - 8
    last = f"{more} more" if more > 0 else str(shown.pop())
    return f"Ranks {', '.join(map(str, shown))} and {last}"


def _described(error: BaseException, rank: int) -> dict[str, Any]:
    if isinstance(error, InfeasibleBudget):
        return {"refused": str(error), "min_budget": error.min_budget}
    if isinstance(error, RematError):
        return {"refused": str(error)}
    reason = str(error).strip().split("\n")[0]
    return {"refused": f"Rank {rank} could not plan this step for all ranks: {type(error).__name__}: {reason}"}


def answer_of(said: dict[str, Any]) -> Any:
    """What was found, or the error that was raised instead."""
    if "found" in said:
        return said["found"]
    raise error_of(said)


def error_of(said: dict[str, Any]) -> RematError:
    """What another rank has raised, with the same sentence."""
    of_budget = "min_budget" in said
    kind = partial(InfeasibleBudget, min_budget=int(said["min_budget"])) if of_budget else RematError
    return kind(str(said["refused"]))


def _packed(said: Any) -> bytes:
    return zlib.compress(json.dumps(said, separators=(",", ":")).encode(), 1)


def _unpacked(data: bytes) -> Any:
    return json.loads(zlib.decompress(data))
