"""GradScaler under a plan on CUDA: a hundred steps of which seven overflow, in eager kernels and compiled."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.support.mixed_precision import Loop, build

import remat

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_overflowing_steps_are_skipped_as_plain_ones_to_the_bit(dtype: torch.dtype, accumulation: int) -> None:
    loop = Loop(dtype, accumulation, device="cuda")
    # Lookups of words add their gradients in any order otherwise.
    torch.use_deterministic_algorithms(True)
    try:
        plain = loop.run(build(depth=2).cuda())
        found = loop.run(
            build(depth=2).cuda(), lambda net, optimizer: remat.optimize(net, "0.8x", optimizer=optimizer, time_limit=2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert plain.skipped() == loop.overflows
    assert plain.differences(found) == []


def test_compiled_plans_skip_as_torch_compile_does() -> None:
    loop = Loop(torch.float16, device="cuda", learning_rate=1e-3)
    plain = loop.run(build(depth=2, dropout=0.0).cuda(), lambda net, optimizer: torch.compile(net))
    found = loop.run(
        build(depth=2, dropout=0.0).cuda(),
        lambda net, optimizer: remat.optimize(net, "0.9x", compiler="inductor", time_limit=2),
    )
    assert found.skipped() == plain.skipped() == loop.overflows and found.scales == plain.scales
    torch.testing.assert_close(found.losses, plain.losses, rtol=1e-2, atol=0.0)
