"""How long a compiled graph takes, forward and backward, on the step's own inputs.

Nothing of the trial stays: gradients are asked for and dropped, random generators and whatever the graph writes to are
put back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from remat.pytorch._compat.modes import without_modes

WARM_RUNS, ROUNDS, RUNS = 2, 5, 4


def time_ns(call: Callable[..., Any], inputs: Sequence[Any], device: torch.device) -> float:
    """Of one run, in the fastest of several rounds: what else the machine does can only make a round slower."""
    wanted = [item for item in inputs if isinstance(item, torch.Tensor) and item.requires_grad]

    def run() -> None:
        outputs = [item for item in call(*inputs) if isinstance(item, torch.Tensor) and item.requires_grad]
        tangents = [torch.ones_like(item) for item in outputs]
        torch.autograd.grad(outputs, wanted, tangents, allow_unused=True)

    with _left_as_it_was(inputs, device), without_modes(), torch.enable_grad():
        for _ in range(WARM_RUNS):
            run()
        return min(_timed(run, device) for _ in range(ROUNDS)) / RUNS


def _timed(run: Callable[[], None], device: torch.device) -> float:
    """Of `RUNS` runs one after the other, as in training: the host is ahead of the device."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        _repeat(run)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e6
    began = time.perf_counter_ns()
    _repeat(run)
    return float(time.perf_counter_ns() - began)


def _repeat(run: Callable[[], None]) -> None:
    for _ in range(RUNS):
        run()


@contextmanager
def _left_as_it_was(inputs: Sequence[Any], device: torch.device) -> Iterator[None]:
    written = [item for item in inputs if isinstance(item, torch.Tensor) and not item.requires_grad]
    before = [item.clone() for item in written]
    devices = [device.index or 0] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for item, kept in zip(written, before, strict=True):
                item.copy_(kept)
