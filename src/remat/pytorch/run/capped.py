"""What a planned step takes from a CUDA device, held to its plan.

The caching allocator keeps what was freed in pieces of the sizes that were asked for, and asks the device for more
where no piece fits: a step whose tensors fit may still run out of memory. Here pieces are made of pages that can be
put together anew, and the allocator may take no more than the plan needs and a little; where it would, it gives back
pages that lie unused first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from remat.errors import RematError
from remat.pytorch._compat.memory import expandable_segments, set_expandable_segments
from remat.pytorch.run.optimize import plan_of, session_of

SLACK = 0.02
"""Of the predicted peak: pages are whole, and small tensors have pages of their own."""


@contextmanager
def capped(step: Any, slack: float = SLACK) -> Iterator[int]:
    """While it lasts, the allocator reserves at most the plan's predicted peak and `slack` of it; gives that number.

    Whatever else the process allocates meanwhile comes out of the same amount. The step must have been planned: run it
    once before.
    """
    limit = int((1 + slack) * plan_of(step).predicted_peak)
    device = session_of(step).owner.device()
    if device.type != "cuda":
        raise RematError(
            f"Only a CUDA device's allocator can be held to a plan, and this step runs on {device}; run it as it is."
        )
    total = torch.cuda.get_device_properties(device).total_memory
    fraction, were_expandable = torch.cuda.get_per_process_memory_fraction(device), expandable_segments()
    set_expandable_segments(True)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(fraction, limit / total), device)
    try:
        yield limit
    finally:
        torch.cuda.set_per_process_memory_fraction(fraction, device)
        set_expandable_segments(were_expandable)
