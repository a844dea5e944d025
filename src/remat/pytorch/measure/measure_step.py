"""The real peak of a step, what it is made of, and how long the step takes.

On CUDA the numbers are the caching allocator's. On CPU every allocation and free is followed as it happens; what was
in memory before is found by looking at what the step can reach: its arguments, modules, optimizers and closures.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from remat.pytorch.costs.allocations import Allocation, watch
from remat.pytorch.cuda_peak import CudaPeak
from remat.pytorch.device import storage_bytes
from remat.pytorch.measure.training_step import TrainingStep
from remat.pytorch.reach import BUCKETS, CLASSES, dense_parts, reachable_from


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
    present = _Present(step, args, kwargs)
    device = present.device
    caching = CudaPeak(device) if device.type == "cuda" else None
    if caching is not None:
        torch.cuda.synchronize(device)
        caching.open()
        start = torch.cuda.memory_allocated(device)
    else:
        start = sum(size for _, size in present.storages.values()) + present.bucket_bytes
    # Casts cached by an autocast region around this call would escape the count.
    torch.clear_autocast_cache()
    began = time.perf_counter()
    try:
        _, events = watch(call, device, present.alive())
        seconds = time.perf_counter() - began
        timeline, peak, live = _follow(events, start, present)
        if caching is not None:
            peak = caching.look()
    finally:
        if caching is not None:
            caching.close()
    return Measurement(peak, _breakdown(present, peak, live), seconds, timeline)


class _Present:
    """What the step can reach before it runs, without keeping alive what the step may drop."""

    def __init__(self, step: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        found = reachable_from(step, args, dict(kwargs))
        self.device = found.device()
        self.bucket_bytes = found.bucket_bytes
        self.storages = {
            int(tensor.untyped_storage().data_ptr()): (name, storage_bytes(tensor, self.device))
            for name, members in found.tensors.items()
            for tensor in members.values()
            if tensor.device.type == self.device.type
        }
        """Class and bytes by address."""
        self.parameters = list(found.parameters.values())
        self._references = [
            weakref.ref(tensor.untyped_storage()) for members in found.tensors.values() for tensor in members.values()
        ]

    def alive(self) -> Iterator[torch.UntypedStorage]:
        return (storage for reference in self._references if (storage := reference()) is not None)

    def gradients(self) -> set[int]:
        """Addresses of the gradients that are there now."""
        return {
            int(part.untyped_storage().data_ptr())
            for parameter in self.parameters
            if parameter.grad is not None
            for part in dense_parts(parameter.grad)
        }


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


def _follow(
    events: tuple[Allocation, ...], start: int, present: _Present
) -> tuple[tuple[int, ...], int, dict[int, tuple[str, int]]]:
    """Live bytes after each event, their maximum, and what is known to be in memory at that moment, by address."""
    timeline, current, peak = [start], start, start
    live = dict(present.storages)
    at_peak = dict(live)
    for event in events:
        current += event.size_bytes
        timeline.append(current)
        if event.size_bytes > 0:
            live[event.address] = ("", event.size_bytes)
        else:
            live.pop(event.address, None)
        if current > peak:
            peak, at_peak = current, dict(live)
    return tuple(timeline), peak, at_peak


def _breakdown(present: _Present, peak: int, at_peak: Mapping[int, tuple[str, int]]) -> dict[str, int]:
    """What the step made is a gradient if it ends as one, and otherwise an activation."""
    parts = dict.fromkeys(CLASSES, 0)
    gradients = present.gradients()
    for address, (name, size) in at_peak.items():
        if name or address in gradients:
            parts[name or "gradients"] += size
    parts[BUCKETS] = present.bucket_bytes
    parts["activations"] = max(0, peak - sum(parts.values()))
    return {name: size for name, size in parts.items() if size}
