"""Profiles on a CUDA device: the allocator's own peak, classes that add up to it, and little that nobody can name."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import remat
from remat import zoo
from remat.core.results.profile import MemoryClass, Phase
from remat.pytorch.measure.profile_step import profile_call
from remat.pytorch.measure.training_step import TrainingStep

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def settled_device() -> Iterator[None]:
    # The first matrix product makes cuBLAS take its workspace, which would count as part of a step.
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
    yield
    gc.collect()
    torch.cuda.empty_cache()


def step_of(name: str, precision: Any = None) -> TrainingStep:
    example = zoo.build(name, scale="demo", device="cuda")
    optimizer = torch.optim.AdamW(example.model.parameters())
    return TrainingStep(example.model, example.args, dict(example.kwargs), optimizer, precision)


def allocator_peak(step: TrainingStep) -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt", "bert", "resnet18", "resnet50", "unet", "lstm", "mlp"])
def test_peak_is_the_allocators_within_one_per_cent(name: str, precision: Any) -> None:
    step = step_of(name, precision)
    step()
    found = profile_call(step, name)
    peak = allocator_peak(step)
    assert found.peak_bytes == pytest.approx(peak, rel=0.01)
    classes = [sum(parts) for parts in zip(*found.bytes_by_class().values(), strict=True)]
    assert tuple(classes) == found.during_bytes
    assert found.reserved_bytes >= found.peak_bytes


@pytest.mark.parametrize("name", ["gpt", "resnet18"])
def test_what_nobody_can_name_is_little(name: str) -> None:
    found = profile_call(step_of(name), name)
    # What other tests and libraries left on the device is `other`, too; the step adds little to it.
    others = found.bytes_by_class()[MemoryClass.OTHER]
    assert max(others) - others[0] <= 0.05 * found.peak_bytes


def test_ops_of_backward_have_their_modules_and_times() -> None:
    found = profile_call(step_of("gpt"), "gpt")
    backward = [op for op in found.ops if op.phase is Phase.BACKWARD]
    assert {"layers.0.attention", "layers.1.mlp.0"} <= {op.module for op in backward}
    assert all(op.time_ns >= 0 for op in found.ops)
    assert 0.2 * found.seconds < sum(op.time_ns for op in found.ops) / 1e9 < 5 * found.seconds


def test_running_out_of_memory_names_the_op_and_keeps_the_rest() -> None:
    class Huge(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x).repeat(1 << 22, 1 << 10).sum()

    with pytest.raises(remat.ProfileStopped, match="of the model itself after .* OutOfMemoryError") as caught:
        remat.profile(Huge().cuda(), torch.randn(64, 64, device="cuda"))
    assert [op.module for op in caught.value.profile.ops[:1]] == ["first"]
