"""What waits on a CUDA device to be run."""

from __future__ import annotations

import torch


def keep_busy(cycles: int) -> None:
    """Let the device do nothing for so many of its clock's cycles, so that what is launched meanwhile waits."""
    torch.cuda._sleep(cycles)
