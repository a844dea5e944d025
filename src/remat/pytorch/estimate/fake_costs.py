"""Time and memory of ops that were followed on fake tensors.

`FakeClock` is told of every op and `FakeLedger` of every storage. Times are the roofline's. Workspace, which fake
tensors do not show, is what CUDA's kernels are known to need, for a device that is not here. On this machine's own
device, the distinct ops that could set the peak run on made-up data, as they do for a plan, and are kept in the cost
cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from remat.core.devices import Device
from remat.core.results.profile import BEFORE
from remat.pytorch.costs.calls import Calls, touched_bytes
from remat.pytorch.costs.op_costs import costs_of
from remat.pytorch.costs.roofline import call_ns
from remat.pytorch.estimate.cuda_rules import workspace_bytes
from remat.pytorch.measure.ledger import Account, SeenStorage, Span, StorageLedger

LARGEST_TRIAL_BYTES = 1 << 30
LONGEST_TRIAL_NS = 1e9
"""Ops that touch more, or should take longer, are not tried."""
LARGEST_WORKSPACE = 2
"""How many times what an op reads and writes its workspace may be: sets which ops could lift the peak."""


class FakeClock:
    """Times by roofline, workspace by rule."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._times: list[float] = []
        self._workspaces: list[int] = []

    def begin(self) -> None:
        pass

    def end(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self._times.append(call_ns(self._device, op, args, kwargs, result))
        self._workspaces.append(workspace_bytes(op, args))

    def times_ns(self) -> list[float]:
        return self._times

    def workspaces(self, live_bytes: Sequence[int]) -> list[int]:
        """One for each op, given what is in memory besides."""
        return self._workspaces


class OwnClock(FakeClock):
    """Times by roofline, workspace by trial on the device in use."""

    def __init__(self, device: Device, own: torch.device) -> None:
        super().__init__(device)
        self._own = own
        self._calls = Calls()
        self._touched: list[int] = []

    def end(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        super().end(op, args, kwargs, result)
        touched = touched_bytes((args, kwargs, result))
        self._touched.append(touched)
        is_moderate = touched <= LARGEST_TRIAL_BYTES and self._times[-1] <= LONGEST_TRIAL_NS
        self._calls.add(op, args, kwargs, result, is_moderate)

    def workspaces(self, live_bytes: Sequence[int]) -> list[int]:
        peak = max(live_bytes, default=0)
        rows = zip(self._calls.keys, live_bytes, self._touched, strict=True)
        keys = [key if live + LARGEST_WORKSPACE * touched >= peak else "" for key, live, touched in rows]
        known = costs_of(self._calls.nodes(key for key in keys if key), self._own)
        return [known[key].workspace_bytes if key else 0 for key in keys]


class FakeLedger(StorageLedger):
    """Sizes as the target's allocator hands them out, and what its matrix library holds."""

    def __init__(self, device: torch.device, clock: FakeClock, grain_bytes: int, held_bytes: int) -> None:
        super().__init__(device)
        self._clock, self._grain, self._held = clock, grain_bytes, held_bytes

    def size_of(self, tensor: torch.Tensor) -> int:
        return -(-super().size_of(tensor) // self._grain) * self._grain

    def account(self, seen: Sequence[SeenStorage], op_count: int) -> Account:
        found = super().account(seen, op_count)
        return replace(
            found,
            start_bytes=found.start_bytes + self._held,
            live_bytes=[level + self._held for level in found.live_bytes],
            workspace_bytes=self._clock.workspaces([level + self._held for level in found.live_bytes]),
            others=[Span(self._held, BEFORE, op_count)] if self._held else [],
        )
