"""The real peak of a step, what it is made of, and how long the step takes.

On CUDA the numbers are the caching allocator's. On CPU every allocation and free is followed as it happens; what was
in memory before is found by looking at what the step can reach: its arguments, modules, optimizers and closures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from remat.pytorch.allocations import Allocation, watch
from remat.pytorch.capture import storage_bytes
from remat.pytorch.reach import Reachable, reachable_from
from remat.pytorch.training_step import TrainingStep


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one run of a step really used."""

    peak_bytes: int
    breakdown: dict[str, int]
    """What the peak is made of, in bytes; adds up to `peak_bytes`."""
    seconds: float
    timeline: tuple[int, ...]
    """Live bytes after each allocation and free."""


def measure(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Measurement:
    """Run `step` twice, once against the clock and once watched. A module is run forward and backward."""
    seconds = seconds_of(training_call(step, args, kwargs), reachable_from(step, args, kwargs).device())
    return replace(measure_once(step, *args, **kwargs), seconds=seconds)


def measure_once(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Measurement:
    """Run `step` once, watched; its time includes the watching."""
    call = training_call(step, args, kwargs)
    found = reachable_from(step, args, kwargs)
    device = found.device()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
    else:
        start = found.total_bytes(device)
    # Casts cached by an autocast region around this call would escape the count.
    torch.clear_autocast_cache()
    began = time.perf_counter()
    _, events = watch(call, device)
    seconds = time.perf_counter() - began
    timeline, peak, live = _follow(events, start)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    return Measurement(peak, _breakdown(found, device, peak, live), seconds, timeline)


def training_call(step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any]:
    """One training step: a module is run forward and backward, a function is one as it is."""
    if isinstance(step, nn.Module):
        return TrainingStep(step, tuple(args), dict(kwargs))
    return lambda: step(*args, **kwargs)


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """What one call takes, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _follow(events: tuple[Allocation, ...], start: int) -> tuple[tuple[int, ...], int, dict[int, int]]:
    """Live bytes after each event, their maximum, and what was allocated and not yet freed at that moment."""
    timeline, current, peak = [start], start, start
    live: dict[int, int] = {}
    at_peak: dict[int, int] = {}
    for event in events:
        current += event.size_bytes
        timeline.append(current)
        if event.size_bytes > 0:
            live[event.address] = event.size_bytes
        else:
            live.pop(event.address, None)
        if current > peak:
            peak, at_peak = current, dict(live)
    return tuple(timeline), peak, at_peak


def _breakdown(found: Reachable, device: torch.device, peak: int, at_peak: dict[int, int]) -> dict[str, int]:
    parts = found.bytes_by_class(device)
    new_gradients = sum(
        size
        for address, size in at_peak.items()
        if address in {gradient.untyped_storage().data_ptr() for gradient in found.gradients_now()}
    )
    parts["gradients"] = parts.get("gradients", 0) + new_gradients
    parts["activations"] = max(0, peak - sum(parts.values()))
    return {name: size for name, size in parts.items() if size}


def device_bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """What distinct storages take on `device`."""
    storages = {int(tensor.untyped_storage()._cdata): tensor for tensor in tensors}
    return sum(storage_bytes(tensor, device) for tensor in storages.values())
