"""`remat doctor TARGET`: findings on stdout, what the model prints on stderr, and 1 unless all is well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("torch")

from remat.cli import app

PATIENTS = """
import torch
from torch import nn


class Talking(nn.Sequential):
    def forward(self, x):
        x = self[0](x)
        print("on my way")
        return self[1](x).square().mean()


def talking():
    return Talking(nn.Linear(8, 64), nn.Linear(64, 8)), torch.randn(64, 8)


def failing():
    return nn.Linear(9, 4), torch.randn(3, 4)
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


@pytest.fixture
def patients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of models that is found nowhere else, so that no other test has imported it."""
    name = f"patients_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(PATIENTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_healthy_model_exits_0() -> None:
    result = run("mlp", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["ok"] and facts["same_bits"] and facts["findings"] == []
    assert (facts["graphs"], facts["covered"], facts["captures"]) == (1, 1.0, [1, 0, 0, 0])
    assert facts["predicted_peak"] == facts["measured_peak"] <= facts["budget"] < facts["plain_peak"]


def test_line_that_cannot_be_traced_is_shown_with_its_place_and_exits_1(patients: str) -> None:
    result = run(f"{patients}:talking", "--budget", "1x")
    assert result.exit_code == 1
    for part in ('`print("on my way")` runs unplanned', f"{patients}.py:9", "Print after the step", "1 thing is not"):
        assert part in result.stdout
    assert "\non my way" not in result.stdout and "on my way" in result.stderr


def test_budget_too_small_names_the_smallest_and_exits_1() -> None:
    result = run("mlp", "--device", "cpu", "--budget", "0.01x", "--json")
    assert result.exit_code == 1
    facts = json.loads(result.stdout)
    (finding,) = facts["findings"]
    assert finding["kind"] == "budget" and "op `" not in finding["what"]
    assert finding["advice"].startswith(f"Give {facts['measured_peak']} bytes")
    assert facts["budget"] < facts["measured_peak"]


def test_model_that_fails_by_itself_is_one_line(patients: str) -> None:
    result = run(f"{patients}:failing")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "cannot be run on its batch" in result.stderr.splitlines()[-1]


def test_budget_that_cannot_be_read_exits_2() -> None:
    assert run("mlp", "--budget", "lots").exit_code == 2
