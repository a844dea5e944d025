"""`remat estimate`: tables and facts on stdout, words where it does not fit, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("torch")

import remat
from remat.cli import app

SOURCE = """
import torch
from torch import nn

def model(batch=2, width=1_000_000_000_000):
    return nn.Linear(width, 1, bias=False).to(torch.bfloat16), torch.ones(batch, width, dtype=torch.bfloat16)

def reads():
    return nn.Linear(int(torch.ones(4).sum().item()), 4), torch.ones(2, 4)

def branches():
    class Branches(nn.Linear):
        def forward(self, data):
            return data.sum() if data.sum().item() > 0 else super().forward(data)
    return Branches(4, 4), torch.ones(2, 4)

def frozen():
    return nn.Linear(4, 4).requires_grad_(False), torch.ones(2, 4)
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["estimate", *(str(argument) for argument in arguments)])


def facts(*arguments: object) -> dict[str, object]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "estimated_model.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "estimated_model", raising=False)
    return "estimated_model"


def test_tables_tell_peak_classes_modules_and_verdict() -> None:
    result = run("mlp", "--gpu", "A100-40GB", "--amp", "bf16")
    assert result.exit_code == 0, result.stderr
    for fact in (
        "A100-40GB",
        "AdamW update, bf16 autocast",
        "fits",
        "activations",
        "layers.0.0",
        "to spare",
        "by roofline",
    ):
        assert fact in result.stdout
    assert "\x1b" not in result.stdout


def test_json_adds_up_and_profile_is_written(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    found = facts("mlp", "--gpu", "t4", "--optimizer", "sgd", "--output", path)
    assert (found["device"], found["optimizer"], found["amp"], found["fits"]) == ("T4", "SGD", "", True)
    assert sum(found["breakdown"].values()) == found["peak"]  # type: ignore[attr-defined]
    assert found["margin"] == found["device_bytes"] - found["peak"]  # type: ignore[operator]
    profile = remat.StepProfile.load(path)
    assert (profile.is_estimate, profile.peak_bytes) == (True, found["peak"])


def test_sizes_are_taken_by_name() -> None:
    small = facts("gpt", "--gpu", "T4", "--optimizer", "none", "--batch", "2", "--length", "16", "--set", "depth=1")
    large = facts("gpt", "--gpu", "T4", "--optimizer", "none", "--batch", "4", "--length", "16", "--set", "depth=1")
    assert small["peak"] < large["peak"]  # type: ignore[operator]


def test_a_preset_far_larger_than_this_machine_does_not_fit_and_is_told_why() -> None:
    found = facts("llama-70b", "--gpu", "A100-40GB", "--amp", "bf16", "--set", "depth=4")
    assert found["fits"] is False
    verdict = str(found["verdict"])
    assert "It does not fit A100-40GB" in verdict
    assert f"The smallest known device that does is {found['smallest_device']}" in verdict
    assert "recomputation is not enough" in verdict


def test_activations_that_remat_can_shrink_are_told() -> None:
    verdict = str(
        facts("llama-1b", "--gpu", "T4", "--optimizer", "none", "--batch", "8", "--set", "depth=4")["verdict"]
    )
    assert "which Remat can shrink" in verdict


def test_a_factory_builds_a_model_of_any_size(module: str) -> None:
    found = facts(f"{module}:model", "--gpu", "H200", "--optimizer", "none", "--batch", "1")
    assert found["breakdown"]["parameters"] == 2 * 10**12  # type: ignore[index]
    assert found["smallest_device"] is None
    assert "No known device holds it alone." in str(found["verdict"])


def test_a_factory_that_needs_values_is_built_in_memory(module: str) -> None:
    result = run(f"{module}:reads", "--gpu", "T4")
    assert result.exit_code == 0, result.stderr
    assert "cannot be built on fake tensors, so it is built in memory" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("mlp", "--gpu", "Z9"), 2, "No device is called 'Z9'; known are cpu,"),
        (("mlp", "--gpu", "T4", "--optimizer", "lion"), 2, "No optimizer is called 'lion'"),
        (("mlp", "--gpu", "T4", "--amp", "fp4"), 2, "No precision is called 'fp4'"),
        (("mlp", "--set", "colour=3"), 2, "The model 'mlp' has no size 'colour'"),
        (("mlp", "--set", "width=much"), 2, "Cannot read the size 'width=much'"),
        (("alexnet",), 2, "neither a zoo model (gpt,"),
        (("mlp", "--devices", "nowhere.json"), 1, "Cannot read nowhere.json"),
        (("estimated_model:model", "--set", "depth=3"), 2, "unexpected keyword argument 'depth'"),
        (("estimated_model:branches", "--gpu", "T4"), 1, "`aten._local_scalar_dense.default` of module"),
        (("estimated_model:frozen", "--gpu", "T4", "--optimizer", "none"), 1, "has a gradient"),
    ],
)
def test_bad_requests_are_refused_in_one_sentence(
    module: str, arguments: tuple[str, ...], code: int, message: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr
