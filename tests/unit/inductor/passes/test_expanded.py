"""Masks that attention reads expanded are computed once, at their own size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from remat.inductor.passes.expanded import settle_expanded
from remat.inductor.passes.settle import SETTLED

BATCH, HEADS, LENGTH, WIDTH = 2, 8, 256, 16


def attention_with(mask_of: Callable[[Tensor], Tensor]) -> tuple[GraphModule, list[Tensor]]:
    """Two layers that read the same mask, made of what the user says; rewritten."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, HEADS, LENGTH, WIDTH, generator=generator)
    told = torch.randn(BATCH, 1, LENGTH, LENGTH, generator=generator)

    def step(x: Tensor, told: Tensor) -> Tensor:
        mask = mask_of(told)
        for _ in range(2):
            x = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x, attn_mask=mask)[0]
        return x

    module = make_fx(step, tracing_mode="fake")(x, told)
    settle_expanded(module)
    module.graph.lint()
    return module, [x, told]


def settled_in(module: GraphModule) -> list[torch.fx.Node]:
    return module.graph.find_nodes(op="call_function", target=SETTLED)


def to_heads(mask: Tensor) -> Tensor:
    return mask.expand(BATCH, HEADS, LENGTH, LENGTH)


def test_an_expanded_mask_is_computed_once_at_its_own_size() -> None:
    module, inputs = attention_with(lambda told: to_heads(told * 2))
    (settled,) = settled_in(module)
    assert settled.meta["val"].shape == (BATCH, 1, LENGTH, LENGTH)
    x, told = inputs
    wanted = x
    for _ in range(2):
        wanted = F.scaled_dot_product_attention(wanted, wanted, wanted, attn_mask=told * 2)
    torch.testing.assert_close(module(*inputs), wanted)


@pytest.mark.parametrize(
    "mask_of",
    [
        pytest.param(to_heads, id="is in memory already"),
        pytest.param(lambda told: to_heads(told) * 2, id="is as large as it is read"),
        pytest.param(lambda told: to_heads(told[:1, :, :1, :1] * 2).contiguous(), id="is computed expanded"),
        pytest.param(lambda told: to_heads(F.linear(told, told[0, 0])), id="is a kernel's of its own"),
    ],
)
def test_other_masks_are_left_alone(mask_of: Callable[[Tensor], Tensor]) -> None:
    module, _ = attention_with(mask_of)
    assert not settled_in(module)
