"""Mixed precision under a plan: what overflows is skipped alike, fp32 islands stay, weights' casts are planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.mixed_precision import Loop, build
from tests.support.nets import check_like_eager
from torch import nn

import remat

FEW = Loop(torch.float16, accumulation=2, steps=6, overflows=(0, 3, 4))
BF16 = Loop(torch.bfloat16, accumulation=2)


def planned(budget: str, **options: Any) -> Any:
    return lambda call, optimizer: remat.optimize(call, budget, time_limit=1, **options)


@pytest.mark.parametrize(
    "loop", [Loop(), pytest.param(BF16, marks=pytest.mark.long)], ids=["fp16", "bf16, two micro-batches"]
)
def test_hundred_steps_of_which_seven_overflow_are_plain_ones_to_the_bit(loop: Loop) -> None:
    plain = loop.run(build(depth=1))
    assert plain.skipped() == loop.overflows and len(loop.overflows) == 7 and loop.steps == 100
    assert min(plain.scales) < 2.0**10 < max(plain.scales)
    models: list[Any] = []
    found = loop.run(
        build(depth=1), lambda net, _: models.append(remat.optimize(net, "0.7x", time_limit=1)) or models[0]
    )
    assert plain.differences(found) == []
    assert remat.plan_of(models[0]).schedule.recomputed()


def test_whole_step_with_accumulation_and_a_scaler_inside_skips_as_before() -> None:
    plain = FEW.run(build(depth=2))
    assert plain.skipped() == FEW.overflows
    given = lambda step, optimizer: remat.optimize(step, "0.8x", optimizer=optimizer, time_limit=1)  # noqa: E731
    assert plain.differences(FEW.run(build(depth=2), given, wraps_step=True)) == []


class Islands(nn.Module):
    """Products that fp16 cannot hold, inside regions without autocast."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.outside, self.inside = (nn.ModuleList(nn.Linear(32, 32) for _ in range(depth)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for outside, inside in zip(self.outside, self.inside, strict=True):
            hidden = F.gelu(outside(x))
            with torch.autocast("cpu", enabled=False):
                x = hidden + torch.sin(inside(hidden.float() * 1e6) / 1e6)
        return x.square().mean()


def test_fp32_islands_are_computed_again_in_fp32() -> None:
    torch.manual_seed(0)
    model, x = Islands(), torch.randn(256, 32)
    with torch.autocast("cpu", torch.float16):
        assert (model.outside[0](x).float() * 1e6).max() > torch.finfo(torch.float16).max
        assert model(x).isfinite()
    plan = remat.plan_of(check_like_eager(model, x, budget="0.6x", dtype=torch.float16))
    again = {plan.problem.graph.ops[number].name for number in plan.schedule.recomputed()}
    # The product by 1e6 of some block, in which backward needs its result.
    assert any(name.startswith("mul") for name in again), again


class Wide(nn.Module):
    """Casts of weights and activations that are about as large."""

    def __init__(self, depth: int = 4, width: int = 64) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(x)))
        return x.float().square().mean()


def casts_of_weights(plan: remat.Plan) -> tuple[set[int], set[int]]:
    """Those that the plan keeps from forward to backward, and those that it makes again."""
    again, reads = plan.schedule.recomputed(), plan.problem.graph.consumers()
    ops = plan.problem.graph.ops
    casts = {
        number
        for number, op in enumerate(ops)
        if "_to_copy" in op.target and not op.inputs and not op.backward
        if any(ops[reader].backward for reader in reads[op.outputs[0]])
    }
    return casts - again.keys(), casts & again.keys()


def test_plan_chooses_which_casts_of_weights_are_kept() -> None:
    torch.manual_seed(0)
    model, x = Wide(), torch.randn(128, 64)
    kept, again = casts_of_weights(remat.plan_of(check_like_eager(model, x, budget="1x", dtype=torch.bfloat16)))
    assert len(kept) == 8 and not again
    fewer, again = casts_of_weights(remat.plan_of(check_like_eager(model, x, budget="0.85x", dtype=torch.bfloat16)))
    assert fewer and again and fewer | again == kept


@pytest.mark.long
@pytest.mark.usefixtures("quick_kernels")
def test_compiled_plans_skip_overflowing_steps_as_torch_compile_does() -> None:
    loop = Loop(torch.bfloat16, learning_rate=1e-3)
    plain = loop.run(build(depth=1, dropout=0.0), lambda net, optimizer: torch.compile(net))
    found = loop.run(build(depth=1, dropout=0.0), planned("0.8x", compiler="inductor"))
    assert found.skipped() == plain.skipped() == loop.overflows and found.scales == plain.scales
    torch.testing.assert_close(found.losses, plain.losses, rtol=1e-3, atol=0.0)
    torch.testing.assert_close(found.weights, plain.weights, rtol=1e-2, atol=1e-3)
