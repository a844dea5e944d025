"""Whether the process of another rank is still there, where that can be told: on the same machine.

In: what a rank wrote of itself, its machine and the number of its process. Out: whether it has ended. Of ranks on other
machines nothing is known here, and they are waited for.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

_PROC = Path("/proc")


def own_process() -> str:
    """This process, for others on the same machine to look for; empty where the system does not tell."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        # In a container of its own, numbers of processes mean something else.
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')} {os.getpid()}"
    except OSError:
        return ""


def introduce_process(store: Any, rank: int) -> None:
    """Say which process a rank is: to all, and in the list of those that are on its machine."""
    process = own_process()
    store.set(process_key(rank), process)
    if process:
        key = _list_key(process)
        store.set(f"{key}/{store.add(key, 1)}", f"{rank} {process}")


def process_key(rank: int) -> str:
    """Where a rank says which process it is, for others on its machine to see whether it ends."""
    return f"process/{rank}"


def _list_key(process: str) -> str:
    return f"machine/{hashlib.sha256(process.rpartition(' ')[0].encode()).hexdigest()[:16]}"


class Neighbours:
    """The ranks that are on this machine: a thousand ranks need not ask for each other."""

    def __init__(self, store: Any) -> None:
        self._store, self._own = store, own_process()
        self._processes: dict[int, str] = {}
        self._read = 0
        """How much of the list is known."""

    def ended(self) -> set[int]:
        """Those whose process is gone."""
        if not self._own:
            return set()
        key = _list_key(self._own)
        for number in range(self._read + 1, self._store.add(key, 0) + 1):
            if not self._store.check([f"{key}/{number}"]):
                break
            rank, _, process = self._store.get(f"{key}/{number}").decode().partition(" ")
            self._processes[int(rank)], self._read = process, number
        return {rank for rank, process in self._processes.items() if has_ended(process)}


def has_ended(process: str) -> bool:
    """Whether a process of this machine is gone, or dead and not yet collected."""
    machine, _, number = process.rpartition(" ")
    if not machine or machine != own_process().rpartition(" ")[0]:
        return False
    try:
        # The name in brackets may hold anything.
        state = (_PROC / number / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in ("Z", "X")
