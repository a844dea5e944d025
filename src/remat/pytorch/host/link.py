"""How fast a store takes tensors and gives them back: measured once for each store of a process."""

from __future__ import annotations

import time
from functools import cache

import torch

from remat.core.copies import Link
from remat.pytorch.host.store import HostStore, Store

PROBE_BYTES, SMALL_BYTES = 32 * 2**20, 4096
REPEATS = 5


@cache
def measured_link(store: Store, device: torch.device) -> Link:
    """Of a store on its device."""
    out, back = _times(store, device, PROBE_BYTES)
    latency = min(_times(store, device, SMALL_BYTES))
    # Without a device of its own the host copies while nothing else runs.
    is_beside = device.type == "cuda" or not isinstance(getattr(store, "inner", store), HostStore)
    return Link(PROBE_BYTES / out, PROBE_BYTES / back, latency, is_beside)


def _times(store: Store, device: torch.device, size_bytes: int) -> tuple[float, float]:
    """Nanoseconds that a copy of so many bytes takes out and back: the middle of a few."""
    tensor = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    rounds = sorted((_round_trip(store, device, tensor) for _ in range(REPEATS)), key=sum)
    return rounds[REPEATS // 2]


def _round_trip(store: Store, device: torch.device, tensor: torch.Tensor) -> tuple[float, float]:
    start = _now(device)
    ticket = store.copy_out(tensor)
    ticket.wait_out()
    middle = _now(device)
    store.copy_back(ticket)
    ticket.wait_back()
    return middle - start, _now(device) - middle


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return float(time.perf_counter_ns())
