"""Estimates of whole steps against what the same steps really use on this CPU, and on GPUs that are not here."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import remat
from remat import zoo
from remat.core.results.profile import MemoryClass
from remat.pytorch.estimate.building_fakes import builds_fakes
from remat.pytorch.measure.training_step import TrainingStep, make_optimizer, precision_of

TOLERANCE = 0.05
IN_FP32 = ("gpt", "resnet18", "unet", "lstm")
"""Without autocast, which only adds casts, one model of each kind."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "costs"))


def measured_peak(name: str, amp: str) -> int:
    example = zoo.build(name)
    optimizer = make_optimizer("adamw", example.model)
    return remat.measure(
        TrainingStep(example.model, example.args, example.kwargs, optimizer, precision_of(amp))
    ).peak_bytes


@pytest.mark.parametrize(
    ("name", "amp"),
    [
        *(
            # Without kernels for it, as on many Arm cores, half precision takes a CPU long.
            pytest.param(name, "bf16", marks=() if name in ("gpt", "resnet18", "lstm", "mlp") else pytest.mark.long)
            for name in zoo.REGISTRY
        ),
        *((name, "none") for name in IN_FP32),
        *(pytest.param(name, "none", marks=pytest.mark.long) for name in zoo.REGISTRY if name not in IN_FP32),
    ],
)
def test_estimate_is_within_five_per_cent_of_the_measured_peak(name: str, amp: str) -> None:
    try:
        peak = measured_peak(name, amp)
    except RuntimeError as error:
        pytest.skip(f"plain PyTorch cannot run it on this machine: {str(error)[:80]}")
    example = zoo.build(name)
    found = remat.estimate(example.model, *example.args, optimizer="adamw", amp=amp, **example.kwargs)
    assert found.peak_bytes == pytest.approx(peak, rel=TOLERANCE)
    assert sum(found.breakdown.values()) == found.peak_bytes
    assert found.fits and found.seconds > 0
    assert found.profile.is_estimate


@pytest.mark.parametrize("name", zoo.REGISTRY)
def test_classes_add_up_at_every_op_on_a_gpu_that_is_not_here(name: str) -> None:
    example = zoo.build(name)
    found = remat.estimate(
        example.model, *example.args, optimizer="adamw", amp="bf16", gpu="A100-40GB", **example.kwargs
    )
    lines = found.profile.bytes_by_class()
    totals = [sum(line[place] for line in lines.values()) for place in range(len(found.profile.ops))]
    assert totals == list(found.profile.during_bytes)
    assert all(item.size_bytes % 512 == 0 for item in found.profile.storages)


def test_the_model_is_left_as_it_was() -> None:
    example = zoo.build("resnet18")
    before = {name: value.clone() for name, value in example.model.state_dict().items()}
    remat.estimate(example.model, *example.args, optimizer="adamw", amp="bf16", gpu="H200")
    assert all(torch.equal(before[name], value) for name, value in example.model.state_dict().items())
    assert all(parameter.grad is None for parameter in example.model.parameters())


@pytest.mark.parametrize("where", ["meta", "fake", "real"])
def test_real_meta_and_fake_models_give_the_same_estimate(where: str) -> None:
    real = zoo.build("gpt")
    wanted = remat.estimate(real.model, *real.args, optimizer="adamw", gpu="T4")
    if where == "fake":
        with builds_fakes():
            example = zoo.build("gpt")
    else:
        example = zoo.build("gpt", device="meta" if where == "meta" else "cpu")
    found = remat.estimate(example.model, *example.args, optimizer="adamw", gpu="T4")
    assert found.peak_bytes == wanted.peak_bytes
    assert found.breakdown == wanted.breakdown


def test_a_model_of_seventy_billion_parameters_needs_no_memory() -> None:
    with builds_fakes():
        example = zoo.build("llama-70b", depth=2)
    found = remat.estimate(example.model, *example.args, optimizer="adamw", amp="bf16", gpu="A100-80GB")
    parameters = sum(parameter.numel() for parameter in example.model.parameters())
    assert found.breakdown[MemoryClass.PARAMETER] == pytest.approx(4 * parameters, rel=1e-3)
    assert found.breakdown[MemoryClass.OPTIMIZER_STATE] == pytest.approx(8 * parameters, rel=1e-3)


def test_transformers_model_is_estimated_as_eager_runs_it() -> None:
    pytest.importorskip("transformers")
    from tests.support.models import build_transformers

    example = build_transformers("gpt2")
    found = remat.estimate(example.model, **example.kwargs)
    measured = remat.measure(TrainingStep(example.model, example.args, example.kwargs)).peak_bytes
    assert found.peak_bytes == pytest.approx(measured, rel=TOLERANCE)
