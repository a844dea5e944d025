"""`remat pareto` and `remat max-batch`: tables, JSON, files, exit codes, and what Ctrl-C keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

torch = pytest.importorskip("torch")

import remat
from remat.cli import app
from remat.cli.subjects import open_subject
from remat.cli.terminal.interrupt import Interrupt

SMALL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

def make():
    return Net(), torch.randn(64, 16)

def sized(batch=32):
    return Net(), torch.randn(batch, 16)

def wrong():
    return Net(), torch.randn(64, 7)
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    # Modules stay imported: each test needs a name of its own.
    name = f"small_net_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    return name


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_pareto_prints_table_and_curve_and_writes_both_files(target: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run("pareto", f"{target}:make", "--points", 3, "--time-limit", 0.3, "-o", tmp_path / "a.png")
    assert result.exit_code == 0, result.stderr
    for fact in ("time over plain", "share", "the same step by other strategies", "sqrt_n", "proven bound"):
        assert fact in result.stdout
    assert "1 of 16" in result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 120
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_pareto_as_json_is_the_file_it_writes(target: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    result = run("pareto", f"{target}:make", "--points", 3, "--solvers", "full", "--verify", "--json", "-o", path)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == json.loads(path.read_text())
    curve = remat.Pareto.load(path)
    assert {point.solver for point in curve.baselines} == {"full"}
    for point in (*curve.points, *curve.baselines):
        assert point.measured_peak_bytes == point.peak_bytes <= point.budget_bytes
        assert point.measured_ratio is not None


def test_pareto_writes_a_page(target: str, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    pytest.importorskip("jinja2")
    path = tmp_path / "a.html"
    result = run("pareto", f"{target}:make", "--points", 2, "--solvers", "full", "--time-limit", 0.3, "-o", path)
    assert result.exit_code == 0, result.stderr
    assert "<html" in path.read_text()[:200]


def test_interrupted_curve_keeps_what_was_found(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Interrupt, "asked", property(lambda self: True, lambda self, asked: None), raising=False)
    result = run("pareto", f"{target}:make", "--points", 4, "--solvers", "", "--json")
    assert result.exit_code == 0, result.stderr
    assert len(json.loads(result.stdout)["points"]) == 4


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (("pareto", "mlp", "-o", "curve.pdf"), "a picture ends in", 2),
        (("pareto", "mlp", "-o", "nowhere/curve.json"), "there is no folder", 1),
        (("pareto", "mlp", "--solvers", "full,magic"), "There is no solver `magic`", 2),
        (("pareto", "alexnet"), "neither a zoo model", 2),
        (("max-batch", "mlp", "-b", "lots"), "Cannot read the budget 'lots'", 2),
        (("max-batch", "mlp", "-b", "2x", "--axis", "depth"), "There is no axis 'depth'", 2),
    ],
)
def test_bad_request_is_one_line(arguments: tuple[str, ...], message: str, code: int) -> None:
    result = run(*arguments)
    assert result.exit_code == code
    assert message in result.stderr.splitlines()[-1]
    assert result.stdout == ""


def test_model_that_fails_on_its_batch_is_one_line(target: str) -> None:
    result = run("pareto", f"{target}:wrong", "--points", 2)
    assert result.exit_code == 1
    assert "cannot be run on its batch: RuntimeError" in result.stderr.splitlines()[-1]


def test_max_batch_shows_three_ways(target: str) -> None:
    result = run("max-batch", f"{target}:sized", "-b", "2x", "--grid", 8, "--time-limit", 1)
    assert result.exit_code == 0, result.stderr
    for fact in ("plain", "per-block checkpointing", "Remat", "as predicted; measured", "fits with Remat"):
        assert fact in result.stdout


def test_budget_below_one_sample_exits_3_with_the_smallest(target: str) -> None:
    result = run("max-batch", f"{target}:make", "-b", 100, "--time-limit", 1, "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["min_budget"] > 100
    assert "a batch of 1 needs" in result.stderr.splitlines()[-1]


def test_factory_that_takes_a_batch_is_asked_for_it_and_others_are_repeated(target: str) -> None:
    asked, usual = open_subject(f"{target}:sized").sized("batch")
    assert (usual, len(asked(5).args[0])) == (32, 5)
    repeated, usual = open_subject(f"{target}:make").sized("batch")
    example = repeated(130)
    assert (usual, len(example.args[0])) == (64, 130)
    assert torch.equal(example.args[0][:64], example.args[0][64:128])
    zoo_model, usual = open_subject("gpt", device="cpu").sized("length")
    assert (usual, zoo_model(9).args[0].shape[1]) == (64, 9)
