"""Better schedules, looked for while training goes on: one search at a time, each in a process of its own."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field

from remat.core.schedule import Schedule
from remat.solve_apart import SearchApart


@dataclass(slots=True)
class Background:
    """Takes searches, and hands over what they found between two steps."""

    _waiting: queue.SimpleQueue[tuple[object, SearchApart]] = field(default_factory=queue.SimpleQueue)
    _done: queue.SimpleQueue[tuple[object, SearchApart, Schedule | None]] = field(default_factory=queue.SimpleQueue)
    _asked: set[object] = field(default_factory=set)
    _thread: threading.Thread | None = None
    failures: list[str] = field(default_factory=list)
    """Why searches ended without an answer; the step goes on with what it has."""

    def ask(self, key: object, search: SearchApart) -> None:
        """Once for each key."""
        if key in self._asked:
            return
        self._asked.add(key)
        self._waiting.put((key, search))
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="remat plans", daemon=True)
            self._thread.start()

    def take(self) -> list[tuple[object, SearchApart, Schedule]]:
        """What was found since the last time."""
        found = []
        while not self._done.empty():
            key, search, schedule = self._done.get()
            if schedule is not None:
                found.append((key, search, schedule))
        return found

    def forget(self) -> None:
        """Nothing that was asked is of use any more, as under another budget."""
        self._asked.clear()
        while not self._waiting.empty():
            self._waiting.get()

    def wait(self) -> None:
        """Until all that was asked is answered."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        while True:
            try:
                key, search = self._waiting.get_nowait()
            except queue.Empty:
                return
            try:
                found = search.run()
            except (RuntimeError, OSError, ValueError) as error:
                self.failures.append(str(error))
                found = None
            self._done.put((key, search, found))
