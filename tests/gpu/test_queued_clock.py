"""What an op costs on a device does not depend on how soon the host launches it."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")

from remat.pytorch.costs.queued_clock import HEAD_STARTS, QueuedClock

pytestmark = pytest.mark.gpu
LATE_S = 3e-4


def test_time_of_the_host_is_not_counted() -> None:
    x, y = torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda")
    clock = QueuedClock(torch.device("cuda"))

    def late() -> None:
        x.add_(1)
        end = time.perf_counter() + LATE_S
        while time.perf_counter() < end:
            pass
        y.add_(1)

    clock(late)
    assert min(clock(late) for _ in range(5)) < 0.5 * LATE_S * 1e9


def test_a_call_that_waits_for_the_device_is_timed() -> None:
    x = torch.ones(8, device="cuda")
    clock = QueuedClock(torch.device("cuda"))
    assert clock(lambda: x.nonzero()) > 0
    assert clock(lambda: x.add_(1)) < 1e6 * len(HEAD_STARTS)
