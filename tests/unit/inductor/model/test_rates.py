"""What kernels of a joint graph cost before it is compiled."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.support.joints import uncut_of
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from remat.inductor.model.rates import measure_rates
from remat.pytorch.costs.roofline import roofline_ns

CPU = torch.device("cpu")


class Attending(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        # On a CPU no gradient can go through it.
        q = x.detach().unflatten(2, (4, -1)).transpose(1, 2)
        near = flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score - 0.01 * (i - j).abs())
        return (x + near.transpose(1, 2).flatten(2)).square().mean()


class Choosing(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return torch.cond(x.mean() > 0, lambda t: t.relu(), lambda t: t.sin(), (x,)).square().mean()


@pytest.mark.parametrize("kind", [Attending, Choosing])
def test_ops_of_ops_have_a_price(kind: type[nn.Module]) -> None:
    uncut = uncut_of(kind(), torch.randn(4, 128, 64, requires_grad=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rates = measure_rates(uncut.joint, uncut.nodes, CPU)
    place = next(place for place, node in enumerate(uncut.nodes) if "flex" in str(node.target) or "cond" in node.name)
    assert rates.alone_ns[place] > 0
    if kind is Attending:
        assert rates.alone_ns[place] == roofline_ns(uncut.nodes[place], CPU)
        assert place not in rates.workspace_bytes
