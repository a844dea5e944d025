"""What torch's own cut saves is told by nodes, not by names, which torch gives away again."""

from __future__ import annotations

import warnings

import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import remat


class NoiseInRegion(nn.Module):
    """Torch adds a node to its forward for the generator's state, by the first name that is free there."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(8, 8, 3, padding=1)
        self.second = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return (checkpoint(lambda h: F.dropout(F.gelu(self.second(h)), 0.2), h, use_reentrant=False) + h).sum()


def test_node_that_torch_adds_for_random_ops_is_not_taken_for_one_of_backward() -> None:
    model = NoiseInRegion()
    step = remat.optimize(model, budget="64MiB", compiler="inductor")
    with warnings.catch_warnings(), inductor_config.patch(fallback_random=True):
        warnings.filterwarnings("error", "A graph of .* is not planned")
        for _ in range(2):
            step(torch.randn(4, 8, 32, requires_grad=True)).backward()
    assert remat.plan_of(step) is not None
