"""A model with collectives in its forward and backward, and a group of one rank to run it in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.support.nets import Stack
from torch import distributed, nn


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone; the test is skipped where torch cannot make one."""
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("no gloo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


class Gather(nn.Module):
    """Gathers rows from all ranks half way; its backward scatters their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = Stack(3), Stack(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed import _functional_collectives as collectives

        gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
        return self.after(gather(self.before(x), 0, distributed.group.WORLD))
