"""How fast a store takes tensors and gives them back: measured once for each store of a process.

Each way alone, and both at once: where they slow each other down, both are taken to be that much slower.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache

import torch

from remat.core.copies import Link
from remat.pytorch.host.store import HostStore, Store, Ticket

PROBE_BYTES, SMALL_BYTES = 32 * 2**20, 4096
REPEATS = 5


@cache
def measured_link(store: Store, device: torch.device) -> Link:
    """Of a store on its device."""
    out_ns, back_ns, both_ns = _times(store, device, PROBE_BYTES)
    *each_ns, _ = _times(store, device, SMALL_BYTES)
    # Without a device of its own the host copies while nothing else runs.
    is_beside = device.type == "cuda" or not isinstance(getattr(store, "inner", store), HostStore)
    slower = max(1.0, both_ns / max(out_ns, back_ns)) if is_beside else 1.0
    return Link(PROBE_BYTES / (out_ns * slower), PROBE_BYTES / (back_ns * slower), max(each_ns), is_beside)


def _times(store: Store, device: torch.device, size_bytes: int) -> tuple[float, float, float]:
    """Nanoseconds that a copy of so many bytes takes out, back, and one each way at once: the least of a few."""
    tensor = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    rounds = [_round_trip(store, device, tensor) for _ in range(REPEATS)]
    return min(item[0] for item in rounds), min(item[1] for item in rounds), min(item[2] for item in rounds)


def _round_trip(store: Store, device: torch.device, tensor: torch.Tensor) -> tuple[float, float, float]:
    moments = [_now(device)]
    first = store.copy_out(tensor)
    moments.append(_arrived(device, [first]))
    store.copy_back(first)
    moments.append(_arrived(device, [first]))
    second = store.copy_out(tensor)
    store.copy_back(first)
    moments.append(_arrived(device, [first, second]))
    out, back, both = (end - start for start, end in zip(moments, moments[1:], strict=False))
    return out, back, both


def _arrived(device: torch.device, tickets: Sequence[Ticket]) -> float:
    for ticket in tickets:
        ticket.wait_out()
        ticket.wait_back()
    return _now(device)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return float(time.perf_counter_ns())
