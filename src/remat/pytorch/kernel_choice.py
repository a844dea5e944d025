"""Whether torch computes with oneDNN on this machine's processor, and that trying an op does not change it.

Where the processor has no kernel for a low precision, torch's first product in it ends the use of oneDNN for the rest
of the process: layouts, bits and bytes of convolutions are others from then on. That is for the user's own step to do.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def onednn_is_used() -> bool:
    return bool(torch.backends.mkldnn.enabled)


@contextmanager
def kernel_choice_kept() -> Iterator[None]:
    """Whatever runs here, torch chooses kernels afterwards as it did before, and has not told of it."""
    before = onednn_is_used()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "mkldnn_matmul failed")
            yield
    finally:
        if before and not onednn_is_used():
            torch.backends.mkldnn.enabled = True
