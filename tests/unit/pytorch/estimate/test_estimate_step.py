"""The estimator's pieces: CUDA's rules on CPU tensors, fake copies, the roofline, and what is refused in words."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from torch import nn

import remat
from remat.core.devices import find_device
from remat.core.results.profile import MemoryClass, Phase
from remat.errors import CaptureError, RematError, UnknownName
from remat.pytorch._compat.fakes import FakeTensorMode, fakes_can_be_converted
from remat.pytorch.costs.fake_copies import FakeCopies
from remat.pytorch.costs.roofline import COMPUTE_SHARE, call_ns
from remat.pytorch.estimate.cuda_rules import cuda_rules, workspace_bytes

A100 = find_device("A100-40GB")
T4 = find_device("T4")


def estimate(model: nn.Module, *args: object, **kwargs: object) -> remat.Estimate:
    """For a GPU that is not here, so that nothing is tried out."""
    return remat.estimate(model, *args, **{"gpu": "A100-40GB", **kwargs})


def targets(found: remat.Estimate, phase: Phase | None = None) -> set[str]:
    return {op.target for op in found.profile.ops if phase in (None, op.phase)}


class Attends(nn.Module):
    def __init__(self, heads: int = 2, key_heads: int = 2, masked: bool = False) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        self.scale = nn.Parameter(torch.ones(()))
        self.mask = torch.ones(16, 16, dtype=torch.bool) if masked else None

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        query = (data * self.scale).expand(3, self.heads, 16, 32)
        key = (data * self.scale).expand(3, self.key_heads, 16, 32)
        grouped = self.heads != self.key_heads
        return F.scaled_dot_product_attention(query, key, key, self.mask, enable_gqa=grouped).sum()


@pytest.mark.parametrize(
    ("model", "dtype", "device", "kernel"),
    [
        (Attends(), torch.bfloat16, "A100-40GB", "_scaled_dot_product_flash_attention"),
        (Attends(4, 2), torch.float16, "A100-40GB", "_scaled_dot_product_flash_attention"),
        (Attends(), torch.float32, "A100-40GB", "_scaled_dot_product_efficient_attention"),
        (Attends(masked=True), torch.bfloat16, "A100-40GB", "_scaled_dot_product_efficient_attention"),
        (Attends(), torch.float16, "T4", "_scaled_dot_product_efficient_attention"),
        (Attends(4, 2), torch.float32, "A100-40GB", "_safe_softmax"),
    ],
)
def test_attention_takes_the_kernel_that_cuda_would(
    model: nn.Module, dtype: torch.dtype, device: str, kernel: str
) -> None:
    found = estimate(copy.deepcopy(model).to(dtype), torch.ones(3, 1, 16, 32, dtype=dtype), gpu=device)
    assert f"aten.{kernel}.default" in targets(found)


def test_dropout_keeps_one_byte_for_each_element_on_cuda() -> None:
    found = estimate(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1)), torch.ones(128, 64))
    masks = [item for item in found.profile.storages if item.name == "aten.native_dropout.default"]
    assert sorted(item.size_bytes for item in masks) == [128 * 64, 128 * 64 * 4]


def test_layer_norm_and_softmax_run_in_fp32_under_autocast_as_on_cuda() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.Softmax(-1))
    found = estimate(model, torch.ones(128, 64), amp="bf16")
    sizes = {item.name: item.size_bytes for item in found.profile.storages}
    assert sizes["aten._softmax.default"] == 128 * 64 * 4
    assert sizes["aten.addmm.default"] == 128 * 64 * 2


def test_fp16_softmax_makes_no_copy() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LogSoftmax(-1))
    casts = {
        amp: sum(op.target == "aten._to_copy.default" for op in estimate(model, torch.ones(8, 64), amp=amp).profile.ops)
        for amp in ("bf16", "fp16")
    }
    assert casts["bf16"] > casts["fp16"]


def test_rms_norm_keeps_its_input_and_a_number_for_each_row() -> None:
    found = estimate(nn.Sequential(nn.Linear(64, 64), nn.RMSNorm(64)), torch.ones(128, 64))
    kept = [item.size_bytes for item in found.profile.storages if item.name == "aten._fused_rms_norm.default"]
    assert 128 * 4 in kept
    assert "aten._fused_rms_norm_backward.default" in targets(found, Phase.BACKWARD)


def test_rules_end_with_their_block_and_hold_for_one_thread() -> None:
    data, seen = torch.ones(8), []
    with cuda_rules(A100):
        thread = threading.Thread(target=lambda: seen.append(F.dropout(data, 0.5)))
        thread.start()
        thread.join()
        assert set(F.dropout(data, 0.5).tolist()) <= {0.0, 2.0}
    assert set(seen[0].tolist()) <= {0.0, 2.0}
    with torch.profiler.profile() as profiler:
        F.dropout(data, 0.5)
    assert "aten::native_dropout" not in {event.name for event in profiler.events()}


def test_flash_backward_needs_sums_in_fp32() -> None:
    query, key = torch.empty(2, 8, 100, 64), torch.empty(2, 2, 100, 64)
    op = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    rows = 2 * 8 * 128
    assert workspace_bytes(op, (query, query, query, query)) == rows * 65 * 4
    assert workspace_bytes(op, (query, query, key, key)) == rows * 65 * 4 + 2 * key.nbytes * 4


def test_all_parameters_are_updated_at_once_on_cuda_and_one_by_one_on_a_cpu() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    assert "aten._foreach_sqrt.default" in targets(estimate(model, torch.ones(2, 64), optimizer="adamw"))
    fused = torch.optim.AdamW(model.parameters(), foreach=False)
    assert "aten._foreach_sqrt.default" not in targets(estimate(model, torch.ones(2, 64), optimizer=fused))


def test_temporaries_of_the_optimizer_are_workspace() -> None:
    found = estimate(nn.Linear(512, 512), torch.ones(1, 512), optimizer="adamw")
    assert found.profile.ops[found.profile.peak_op].phase is Phase.OPTIMIZER
    assert found.breakdown[MemoryClass.WORKSPACE] >= 512 * 512 * 4
    assert found.fixed_bytes == found.peak_bytes - found.breakdown.get(MemoryClass.ACTIVATION, 0)


def test_an_optimizer_with_state_is_copied_with_it() -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = estimate(model, torch.ones(2, 64), optimizer=optimizer)
    assert found.optimizer == "SGD"
    assert found.breakdown[MemoryClass.OPTIMIZER_STATE] == (64 * 64 + 128) * 4
    assert not optimizer.state


def test_matrix_library_holds_its_workspace() -> None:
    found = estimate(nn.Linear(8, 8), torch.ones(2, 8))
    assert found.breakdown[MemoryClass.OTHER] == 2 * A100.matmul_workspace_bytes


def test_twins_share_what_the_originals_share() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    fake = FakeCopies("cpu", torch.device("cpu")).of_model(model)
    assert fake[0].weight is fake[1].weight
    assert fake[0].weight.untyped_storage().nbytes() == 64


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = nn.Linear(4, 4)
    model.lock = threading.Lock()
    with pytest.raises(CaptureError, match="The model Linear cannot be copied for an estimate"):
        estimate(model, torch.ones(2, 4))


def test_fake_modules_can_be_converted_and_stay_tied() -> None:
    with FakeTensorMode(), fakes_can_be_converted():
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
        model[1].weight = model[0].weight
        model.to(torch.bfloat16)
    assert model[0].weight.dtype is torch.bfloat16
    assert model[0].weight is model[1].weight
    assert isinstance(model[0].weight, nn.Parameter)


def test_roofline_is_the_larger_of_arithmetic_and_traffic() -> None:
    left = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    time = call_ns(A100, torch.ops.aten.mm.default, (left, left), {}, left)
    assert time == pytest.approx(2 * 4096**3 / (312e3 * COMPUTE_SHARE), rel=0.05)
    assert call_ns(T4, torch.ops.aten.mm.default, (left, left), {}, left) > 10 * time


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.chooser = Chooser()

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.chooser(self.inner(data))


class Chooser(nn.Module):
    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return data if data.sum().item() > 0 else -data


def test_values_that_fake_tensors_lack_are_named_with_op_and_module() -> None:
    with pytest.raises(
        CaptureError, match=r"`aten._local_scalar_dense.default` of module `chooser` depends on the values"
    ):
        estimate(Branches(), torch.ones(2, 4))


def test_an_error_of_the_model_is_named_with_its_module() -> None:
    with pytest.raises(
        CaptureError, match=r"stopped in `aten.addmm.default` of module `1`.*run the step without Remat"
    ):
        estimate(nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4)), torch.ones(2, 4))


def test_a_model_without_gradient_is_refused() -> None:
    with pytest.raises(RematError, match="Nothing that Linear returned has a gradient"):
        estimate(nn.Linear(4, 4).requires_grad_(False), torch.ones(2, 4))
    with pytest.raises(RematError, match="no parameter that requires a gradient"):
        estimate(nn.Linear(4, 4).requires_grad_(False), torch.ones(2, 4), optimizer="adamw")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"optimizer": "lion"}, "No optimizer is called 'lion'; choose one of none, adamw, adam, sgd"),
        ({"amp": "fp4"}, "No precision is called 'fp4'; choose one of none, bf16, fp16"),
        ({"gpu": "Z9"}, "No device is called 'Z9'; known are cpu, V100-16GB"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(wrong: dict[str, str], message: str) -> None:
    with pytest.raises(UnknownName, match=message):
        estimate(nn.Linear(4, 4), torch.ones(2, 4), **wrong)


def test_something_that_is_no_module_is_refused() -> None:
    with pytest.raises(RematError, match="An estimate needs a module, got function"):
        estimate(lambda: None)  # type: ignore[arg-type]


def test_a_device_of_a_file_can_be_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(
        '{"format": "remat-devices", "version": 1, "devices": [{"name": "Tiny", "memory_bytes": 536870913, '
        '"gigabytes_per_second": 1, "teraflops": {"fp32": 1}}]}'
    )
    found = estimate(nn.Linear(4, 4), torch.ones(2, 4), gpu="tiny", devices=[path])
    assert (found.fits, found.device.usable_bytes) == (False, 1)
    assert found.margin_bytes == 1 - found.peak_bytes
