"""A recurrence that Python unrolls: many small blocks, each of which needs the one before."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import remat


class CellLoop(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(4, width), nn.Linear(width, 1)

    def forward(self, sequence: Tensor) -> Tensor:
        hidden = cell = sequence.new_zeros(sequence.shape[1], self.cell.hidden_size)
        for item in sequence:
            hidden, cell = self.cell(item, (hidden, cell))
        return F.softplus(self.head(hidden)).mean()


def test_unrolled_cells_train_to_the_same_bits_with_less() -> None:
    torch.manual_seed(0)
    plain, sequence = CellLoop(), torch.randn(20, 64, 4)
    model = copy.deepcopy(plain)
    planned = remat.optimize(model, budget="0.6x", time_limit=4)
    for step, net in ((plain, plain), (planned, model)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            step(sequence).backward()
            optimizer.step()
    plan = remat.plan_of(planned)
    assert plan.predicted_peak <= 0.6 * plan.plain_peak_bytes + 1
    assert plan.overhead > 0
    for left, right in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(left, right)
