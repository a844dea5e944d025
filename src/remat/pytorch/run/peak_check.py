"""Whether planned steps keep within their budget, where a device tells its peak; what they need beyond is kept free.

A kernel of a library may take more in a step than by itself, and the caller's code may need memory between forward and
backward.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from remat.core.budget import format_bytes
from remat.pytorch.cuda_peak import CudaPeak

CHECKED_STEPS = 3
"""After a plan was made; the step in which that happened, and in which libraries set themselves up, is none of them."""


@dataclass(slots=True)
class PeakCheck:
    beyond_bytes: int = 0
    """What steps were seen to need beyond what was foreseen."""
    _left: int = 0
    _peak: CudaPeak | None = None

    def after_planning(self) -> None:
        self._left = CHECKED_STEPS

    def begin_step(self, device: torch.device) -> None:
        self.stop()
        if not self._left or not tells_peak(device):
            return
        self._left -= 1
        self._peak = CudaPeak(device)
        self._peak.open()

    def is_exceeded(self, allowed_bytes: int) -> bool:
        """Whether the step that ends now needed more than it may: that much is left free from now on."""
        excess = self.stop() - allowed_bytes
        if excess <= 0:
            return False
        self.beyond_bytes += excess
        warnings.warn(
            f"The step needed {format_bytes(excess)} more than its budget; the next ones are planned with that much "
            "less.",
            stacklevel=2,
        )
        return True

    def stop(self) -> int:
        """The peak so far; 0 where nobody looks at it."""
        if self._peak is None:
            return 0
        peak, self._peak = self._peak, None
        found = peak.take()
        peak.close()
        return found


def tells_peak(device: torch.device) -> bool:
    return device.type == "cuda"
