"""Whether planned steps keep within their budget, where a device tells its peak; what they need beyond is kept free.

A kernel of a library may take more in a step than by itself, the caller's code may need memory between forward and
backward, and a gradient in another layout than its parameter's is copied when it is accumulated. A step is looked at
from its start to the end of its last backward: what an optimizer takes after that no plan can change, nor what other
models do that are trained or tried out between two steps.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from remat.core.budget import format_bytes
from remat.pytorch._compat.engine import unwatch_engine, watch_engine
from remat.pytorch.cuda_peak import CudaPeak
from remat.pytorch.run.watching.drift import Gate

CHECKED_STEPS = 3
"""After a plan was made, whatever looking takes; the step in which that happened, and in which libraries set themselves
up, is none of them."""


@dataclass(slots=True, eq=False)
class PeakCheck:
    beyond_bytes: int = 0
    """What steps were seen to need beyond what was foreseen."""
    seen_bytes: int = 0
    """The largest peak of a step since the last plan was made."""
    gate: Gate = field(default_factory=Gate)
    """Which of the later steps are looked at, too."""
    _is_watching: bool = False
    _is_late: bool = False
    """Whether the step is none of the first, of which the first backward says enough."""
    _left: int = 0
    _goes_back: bool = False
    """Whether the backward under way is one of the step's."""
    _peak: CudaPeak | None = None
    _seen_bytes: int = 0

    def after_planning(self) -> None:
        self.stop()
        self._left, self.seen_bytes = CHECKED_STEPS, 0

    def begin_step(self, device: torch.device, allowed_bytes: int) -> None:
        """Look at the step that begins, if it is one of the first or there is time for it."""
        self.stop()
        is_due = self.gate.is_due() and allowed_bytes > 0
        if not tells_peak(device) or not (self._left or is_due):
            return
        start = time.perf_counter_ns()
        self._is_watching, self._is_late = True, not self._left
        self._left -= self._left > 0
        self._peak = CudaPeak(device)
        self._peak.open(may_have_been=allowed_bytes)
        watch_engine(self)
        self.gate.spent_ns += time.perf_counter_ns() - start

    @property
    def is_watching(self) -> bool:
        """Whether the step under way is looked at."""
        return self._is_watching

    def engine_began(self, roots: Sequence[torch.Tensor]) -> None:
        """Whose backward it is, `goes_back` tells."""
        self._goes_back = False

    def goes_back(self) -> None:
        """The engine has come to the step's own graph."""
        self._goes_back = True

    def engine_returned(self) -> None:
        if self._peak is not None and self._goes_back:
            start = time.perf_counter_ns()
            self._seen_bytes = self._peak.look()
            if self._is_late:
                # There may be no next step, and somebody else's backwards are none of its business.
                self._look_away()
            self.gate.spent_ns += time.perf_counter_ns() - start

    def is_exceeded(self, allowed_bytes: int) -> bool:
        """Whether the step that is over needed more than it may: that much is left free from now on."""
        seen = self.stop()
        self.seen_bytes = max(self.seen_bytes, seen)
        excess = seen - allowed_bytes
        if excess <= 0:
            return False
        self.beyond_bytes += excess
        warnings.warn(
            f"The last step needed {format_bytes(excess)} more than its budget; the next ones are planned with that "
            "much less.",
            stacklevel=3,
        )
        return True

    def _look_away(self) -> None:
        if self._is_watching:
            self._is_watching = False
            unwatch_engine(self)

    def stop(self) -> int:
        """The peak at the end of the last backward; 0 where nobody looked at it."""
        if self._peak is None:
            return 0
        self._look_away()
        self._peak.close()
        self._peak = None
        seen, self._seen_bytes = self._seen_bytes, 0
        return seen


def tells_peak(device: torch.device) -> bool:
    return device.type == "cuda"
