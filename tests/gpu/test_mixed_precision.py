"""GradScaler under a plan on CUDA: a hundred steps of which seven overflow, in eager kernels and compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from tests.support.mixed_precision import Loop, build

import remat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Steps take .* times as long as when they were planned"),
]
BATCH = 2048
"""So that activations are more than the workspace that cuBLAS keeps."""


@pytest.fixture
def deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lookups of words add their gradients in any order otherwise."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic_kernels")
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_overflowing_steps_are_skipped_as_plain_ones_to_the_bit(dtype: torch.dtype, accumulation: int) -> None:
    loop = Loop(dtype, accumulation, device="cuda", batch=BATCH)
    plain = loop.run(build(depth=2).cuda())
    assert plain.skipped() == loop.overflows
    found = loop.run(build(depth=2).cuda(), lambda net, optimizer: remat.optimize(net, "0.9x", time_limit=2))
    assert plain.differences(found) == []


def test_compiled_plans_skip_as_torch_compile_does() -> None:
    loop = Loop(torch.float16, device="cuda", learning_rate=1e-3, batch=BATCH)
    plain = loop.run(build(depth=2, dropout=0.0).cuda(), lambda net, optimizer: torch.compile(net))
    found = loop.run(
        build(depth=2, dropout=0.0).cuda(),
        lambda net, optimizer: remat.optimize(net, "1.2x", compiler="inductor", time_limit=2),
    )
    assert found.skipped() == plain.skipped() == loop.overflows and found.scales == plain.scales
    torch.testing.assert_close(found.losses, plain.losses, rtol=1e-2, atol=0.0)
