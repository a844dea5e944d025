"""How a device hands out memory: what sizes, slacks and arenas depend on.

In: the kind of a device, as `torch.device.type` and plans name it. Out: `MemoryRules`. A CPU hands out what it was
asked for; CUDA's caching allocator rounds sizes up and keeps blocks that are larger than the request.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.core.caching_allocator import GRAIN, allocator_slack_bytes, history_bytes, requests
from remat.core.problem import Problem
from remat.core.schedule import Schedule


@dataclass(frozen=True, slots=True)
class MemoryRules:
    size_step_bytes: int
    """A storage takes a multiple of this."""
    address_step_bytes: int
    """Buffers in an arena begin at multiples of this."""
    keeps_blocks: bool
    """Whether a request may get a larger block that was freed before."""

    def rounded(self, size_bytes: int) -> int:
        return -(-size_bytes // self.size_step_bytes) * self.size_step_bytes

    def least_slack_bytes(self, problem: Problem) -> int:
        """What every schedule takes on top of what is alive in it; 0 where each request gets what it asks for."""
        return history_bytes(requests(problem)) if self.keeps_blocks else 0

    def slack_bytes(self, problem: Problem, schedule: Schedule) -> int:
        """What the allocator takes above the simulated peak."""
        return allocator_slack_bytes(problem, schedule) if self.keeps_blocks else 0


CPU = MemoryRules(size_step_bytes=1, address_step_bytes=64, keeps_blocks=False)
CUDA = MemoryRules(size_step_bytes=GRAIN, address_step_bytes=GRAIN, keeps_blocks=True)


def memory_rules(device: str) -> MemoryRules:
    """Of a device by its kind, or by the name that plans give it."""
    return CUDA if device.startswith("cuda") else CPU
