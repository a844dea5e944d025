"""Whether the process of another rank is still there, where that can be told: on the same machine.

In: what a rank wrote of itself, its machine and the number of its process. Out: whether it has ended. Of ranks on other
machines nothing is known here, and they are waited for.
"""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")


def own_process() -> str:
    """This process, for others on the same machine to look for; empty where the system does not tell."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        # In a container of its own, numbers of processes mean something else.
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')} {os.getpid()}"
    except OSError:
        return ""


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
