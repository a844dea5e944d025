"""Errors that say that memory ran out: which they are, and how to let go of what they hold.

In: an exception. Out: whether it is one of these. A traceback keeps every local variable of the failed step alive, and
with them all that its forward saved, so it is emptied before the step runs again.
"""

from __future__ import annotations

import gc
import traceback

import torch

CPU_WORDS = ("can't allocate memory", "not enough memory")
"""What torch's allocators for the CPU say; they raise a plain RuntimeError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the CPU had no memory left."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in CPU_WORDS)


def let_go_of(error: BaseException) -> None:
    """Free what the failed step had in memory: its variables, what autograd saved, and unused pages of the device."""
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
