"""Estimates against what steps really use on a GPU: for the card that is here, and by rule alone."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")

import remat
from remat import zoo
from remat.core.devices import find_device
from remat.pytorch.estimate.building_fakes import builds_fakes
from remat.pytorch.measure.training_step import TrainingStep, make_optimizer, precision_of

pytestmark = pytest.mark.gpu
LARGE = {
    "gpt": dict(batch=32, length=256, width=512, heads=8),
    "resnet50": dict(batch=64, side=64, width=64, shrink=1),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "costs"))
    # What earlier tests left would count as part of a step; each of their streams has a workspace of its own.
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def measured_peak(name: str) -> int:
    example = zoo.build(name, scale="demo", device="cuda", **LARGE[name])
    optimizer = make_optimizer("adamw", example.model)
    step = TrainingStep(example.model, example.args, example.kwargs, optimizer, precision_of("bf16"))
    step()
    return remat.measure(step).peak_bytes


@pytest.mark.parametrize("name", LARGE)
def test_estimate_for_the_card_in_use_is_within_five_per_cent(name: str) -> None:
    example = zoo.build(name, scale="demo", device="cuda", **LARGE[name])
    found = remat.estimate(example.model, *example.args, optimizer="adamw", amp="bf16")
    del example
    assert found.peak_bytes == pytest.approx(measured_peak(name), rel=0.05)
    assert found.device.memory_bytes == torch.cuda.get_device_properties(0).total_memory


def test_estimate_by_rule_is_within_five_per_cent_of_a_transformer() -> None:
    with builds_fakes():
        example = zoo.build("gpt", scale="demo", **LARGE["gpt"])
    # A card that is not here has to be estimated by rule.
    found = remat.estimate(example.model, *example.args, optimizer="adamw", amp="bf16", gpu="MI300X")
    here = find_device(torch.cuda.get_device_name(0).removeprefix("NVIDIA "))
    other = 2 * (found.device.matmul_workspace_bytes - here.matmul_workspace_bytes)
    assert found.peak_bytes == pytest.approx(measured_peak("gpt") + other, rel=0.05)
