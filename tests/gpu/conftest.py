"""What tests on a CUDA device share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def fresh_device() -> Iterator[None]:
    """Nothing is compiled, matmuls have their workspaces, and nothing is left in the allocator's pool afterwards."""
    import torch

    torch._dynamo.reset()
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
    yield
    gc.collect()
    torch.cuda.empty_cache()
