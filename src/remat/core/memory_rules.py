"""How a device hands out memory: what sizes, slacks and arenas depend on.

In: the kind of a device, as `torch.device.type` and plans name it. Out: `MemoryRules`. A CPU hands out what it was
asked for; CUDA's caching allocator rounds sizes up and keeps blocks that are larger than the request.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.core.caching_allocator import GRAIN, HISTORY, allocator_slack_bytes
from remat.core.problem import Problem
from remat.core.schedule import Schedule


@dataclass(frozen=True, slots=True)
class MemoryRules:
    size_step_bytes: int
    """A storage takes a multiple of this."""
    address_step_bytes: int
    """Buffers in an arena begin at multiples of this."""
    least_slack_bytes: int
    """What every schedule takes on top of what is alive in it; 0 where allocators give just what is asked for."""

    @property
    def is_exact(self) -> bool:
        return self.least_slack_bytes == 0

    def rounded(self, size_bytes: int) -> int:
        return -(-size_bytes // self.size_step_bytes) * self.size_step_bytes

    def slack_bytes(self, problem: Problem, schedule: Schedule) -> int:
        """What the allocator takes above the simulated peak."""
        return 0 if self.is_exact else allocator_slack_bytes(problem, schedule)


CPU = MemoryRules(size_step_bytes=1, address_step_bytes=64, least_slack_bytes=0)
CUDA = MemoryRules(size_step_bytes=GRAIN, address_step_bytes=GRAIN, least_slack_bytes=HISTORY)


def memory_rules(device: str) -> MemoryRules:
    """Of a device by its kind, or by the name that plans give it."""
    return CUDA if device.startswith("cuda") else CPU
