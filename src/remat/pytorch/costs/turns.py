"""Turns among processes: one that measures kernels on a device while another does measures the other's, too.

In: what is to be used alone. Out: a context in which it is. Whoever waits too long, or gets no lock, goes on without:
what is measured then is less exact, and nothing stops.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator

import torch

from remat.core.cache_file import cache_folder, take_lock

WAIT_S = 60.0
"""How long to wait for the others."""
_PAUSE_S = 0.02


def measuring_alone(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """While no other process that plans measures there. A CPU has other cores for others."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return turn_at(f"cuda-{torch.cuda.get_device_properties(device).uuid}")


@contextlib.contextmanager
def turn_at(what: str, wait_s: float = WAIT_S) -> Iterator[None]:
    handle = _opened(what)
    if handle is None:
        yield
        return
    try:
        until = time.monotonic() + wait_s
        while not take_lock(handle) and time.monotonic() < until:
            time.sleep(_PAUSE_S)
        yield
    finally:
        os.close(handle)


def _opened(what: str) -> int | None:
    path = cache_folder() / "turns" / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', what)}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError:
        # The cache itself says what is wrong with its folder.
        return None
