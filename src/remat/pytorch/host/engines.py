"""What copies between a device and host memory: one engine for each direction, each in order.

In: flat tensors on either side. Out: the moment at which a copy ends. On CUDA the engines are streams, and a moment is
an event that other streams wait for; the host never does. On CPU a copy is over when it returns: no moment.
No tensor is told which streams use it (`record_stream`): who calls keeps it until the compute stream has waited.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

Moment = Any
"""The end of a copy or of computations, as its engines know it; None where nothing is ever under way."""


class Engines(Protocol):
    device: torch.device

    def now(self) -> Moment:
        """The end of what the calling thread has had computed so far."""

    def send(self, source: torch.Tensor, target: torch.Tensor) -> Moment:
        """Copy from the device to the host, after what was computed so far."""

    def fetch(self, source: torch.Tensor, target: torch.Tensor, *after: Moment) -> Moment:
        """Copy from the host to the device, after all of `after`."""

    def wait(self, moment: Moment) -> None:
        """What is computed from now on comes after `moment`."""

    def finish(self, moment: Moment) -> None:
        """The calling thread waits until `moment` is over."""


class PlainEngines:
    """Copies at once, for a device whose memory is the host's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> None:
        """Computations are over when they return."""

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    def fetch(self, source: torch.Tensor, target: torch.Tensor, *after: Moment) -> None:
        target.copy_(source)

    def wait(self, moment: Moment) -> None:
        """Copies are over when they return."""

    def finish(self, moment: Moment) -> None:
        """Copies are over when they return."""


class CudaEngines:
    """A stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def now(self) -> Moment:
        return torch.cuda.current_stream(self.device).record_event()

    def send(self, source: torch.Tensor, target: torch.Tensor) -> Moment:
        return _copy(self._out, source, target, self.now())

    def fetch(self, source: torch.Tensor, target: torch.Tensor, *after: Moment) -> Moment:
        return _copy(self._back, source, target, *after)

    def wait(self, moment: Moment) -> None:
        torch.cuda.current_stream(self.device).wait_event(moment)

    def finish(self, moment: Moment) -> None:
        moment.synchronize()


def _copy(stream: Any, source: torch.Tensor, target: torch.Tensor, *after: Moment) -> Moment:
    for moment in after:
        stream.wait_event(moment)
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    return stream.record_event()


def engines_of(device: torch.device) -> Engines:
    return CudaEngines(device) if device.type == "cuda" else PlainEngines(device)
