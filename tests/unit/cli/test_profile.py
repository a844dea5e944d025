"""`remat profile` on targets: facts and tables on stdout, files, and failures that keep what was learnt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("torch")

import remat
from remat.cli import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["profile", *map(str, arguments)])


def test_tables_say_what_the_peak_is_made_of() -> None:
    result = run("mlp", "--device", "cpu", "--top", 5)
    assert result.exit_code == 0, result.stderr
    for fact in ("Peak ", "wait for backward", "optimizer state", "Largest at the peak", "layers.0.0", "more (--top)"):
        assert fact in result.stdout


def test_json_and_file_agree(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    result = run("mlp", "--device", "cpu", "--json", "--output", path, "--optimizer", "none")
    facts = json.loads(result.stdout)
    found = remat.StepProfile.load(path)
    assert facts["peak_bytes"] == found.peak_bytes == sum(facts["breakdown"].values())
    assert facts["ops"] == len(found.ops)
    assert "optimizer state" not in facts["breakdown"]
    assert facts["peak_op"]["target"] == found.ops[found.peak_op].target


def test_autocast_lowers_the_activations() -> None:
    plain = json.loads(run("gpt", "--device", "cpu", "--json").stdout)["breakdown"]["activations"]
    cast = json.loads(run("gpt", "--device", "cpu", "--json", "--amp", "bf16").stdout)["breakdown"]["activations"]
    assert cast < plain


def test_target_that_fails_prints_the_part_and_exits_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def make():\n    return nn.Sequential(nn.Linear(4, 8), nn.Linear(9, 4)), torch.randn(3, 4)\n"
    )
    monkeypatch.chdir(tmp_path)
    result = run("half:make", "--json", "--output", "part.json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["ops"] == 2
    assert "The step stopped in `aten.addmm.default` of module `1` after 2 ops" in result.stderr.splitlines()[-1]
    assert remat.StepProfile.load(tmp_path / "part.json").stopped_by


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("alexnet",), "neither a zoo model"),
        (("mlp", "--optimizer", "magic"), "No optimizer is called 'magic'; choose one of none, adamw"),
        (("mlp", "--amp", "int3"), "No precision is called 'int3'; choose one of none, bf16"),
    ],
)
def test_bad_request_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments, "--device", "cpu")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr.splitlines()[-1]
