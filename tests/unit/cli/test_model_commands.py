"""`remat plan`, `verify`, `doctor` and `demo` on the zoo: facts on stdout, exit codes, pictures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("torch")

import remat
from remat import zoo
from remat.cli import app, demo
from remat.cli.training import compare_training


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_plan_prints_what_is_promised_and_proven() -> None:
    result = run("plan", "mlp", "--budget", "0.6x", "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    for fact in ("plain peak", "(0.60x)", "predicted peak", "plain step", "planned step", "bound", "gap"):
        assert fact in result.stdout


def test_plan_as_json_keeps_within_the_budget_and_saves_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    result = run(
        "plan", "mlp", "-b", "0.6x", "--device", "cpu", "--output", path, "--json", "--compare", "--explain", ""
    )
    facts = json.loads(result.stdout)
    assert facts["predicted_peak"] <= facts["budget"] < facts["plain_peak"]
    assert {row["solver"] for row in facts["comparison"]} >= {"none", "full"}
    assert sum(row["op_count"] for row in facts["explanation"]) > 0
    assert remat.Plan.load(path).predicted_peak == facts["predicted_peak"]


def test_plan_explains_one_module() -> None:
    result = run("plan", "mlp", "-b", "0.6x", "--device", "cpu", "--explain", "layers.3", "--compare")
    assert "layers.3: keeps" in result.stdout
    assert "sqrt_n" in result.stdout


def test_budget_below_the_floor_exits_3_with_the_smallest_one() -> None:
    result = run("plan", "mlp", "-b", "1KiB", "--device", "cpu", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["min_budget"] > 1024
    assert "remat: error: Budget 1.00 KiB is below" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "alexnet", "-b", "0.6x"), "neither a zoo model"),
        (("plan", "mlp", "-b", "0.6y"), "Cannot read the unit 'y'"),
        (("plan", "mlp", "-b", "0.6x", "--solver", "magic"), "There is no solver `magic`"),
        (("plan", "mlp", "-b", "0.6x", "--scale", "vast"), "No scale is called 'vast'"),
        (("verify", "mlp", "-b", "0.6x", "--device", "abacus"), "Cannot use the device 'abacus'"),
        (("demo", "--budget", "half"), "Cannot read the budget 'half'"),
    ],
)
def test_bad_request_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr.splitlines()[-1]


def test_refuses_before_it_works(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "plan.json"
    result = run("plan", "mlp", "-b", "0.6x", "--output", missing)
    assert result.exit_code == 1
    assert (
        result.stderr
        == f"remat: error: Cannot write {missing}: there is no folder {missing.parent}; create it first.\n"
    )
    assert run("demo", "--scale", "vast", "--output", tmp_path).stderr.startswith("remat: error: No scale is called")


def test_model_that_fails_on_its_batch_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong_batch.py").write_text(
        "import torch\n\ndef make():\n    return torch.nn.Linear(2, 2), torch.randn(3, 7)\n"
    )
    monkeypatch.chdir(tmp_path)
    result = run("plan", "wrong_batch:make", "-b", "0.6x")
    assert result.exit_code == 1
    assert "cannot be run on its batch: RuntimeError: " in result.stderr.splitlines()[-1]
    assert len(result.stderr.splitlines()) == 2


def test_verify_finds_the_same_bits_over_several_steps() -> None:
    result = run("verify", "mlp", "-b", "0.6x", "--steps", 2, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == {"ok": True, "target": "mlp", "steps": 2, "differences": []}


def test_verify_exits_4_and_lists_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = remat.Verification(ok=False, differences=("output 0 differs by up to 1",))
    monkeypatch.setattr(remat, "verify", lambda *args, **kwargs: found, raising=False)
    result = run("verify", "mlp", "-b", "0.6x", "--device", "cpu", "--json")
    assert result.exit_code == 4
    assert json.loads(result.stdout)["differences"] == ["step 1: output 0 differs by up to 1"]
    assert "remat: error: mlp differs from its plain step" in result.stderr


def test_doctor_names_versions_device_cache_and_solvers(cache_folder: Path) -> None:
    result = run("doctor", "--json")
    facts = json.loads(result.stdout)
    assert result.exit_code == 0
    assert facts["ok"] is True
    assert facts["remat"] == remat.__version__
    assert facts["cache"] == str(cache_folder)
    assert "auto" in facts["solvers"]


def test_doctor_names_the_extra_of_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remat.cli.doctor._version", lambda name: None)
    assert "not installed: pip install 'remat[solvers]'" in run("doctor").stdout


@pytest.mark.slow
def test_demo_trains_both_models_alike_within_budget_and_draws_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("plotly")
    result = run("demo", "--scale", "tiny", "--steps", 2, "--device", "cpu", "--output", tmp_path, "--json")
    assert result.exit_code == 0, result.stderr
    runs = json.loads(result.stdout)["runs"]
    assert [facts["model"] for facts in runs] == ["gpt", "resnet18"]
    for facts in runs:
        assert facts["same_losses"]
        assert facts["within_budget"]
        assert abs(facts["prediction_error"]) < 0.01
        assert Path(facts["picture"]).stat().st_size > 10_000
        assert f"{facts['model']} trains in" in Path(facts["report"]).read_text()


@pytest.mark.long
def test_a_model_that_cannot_be_halved_here_trains_in_the_least_it_can_and_says_so() -> None:
    make = partial(zoo.build, "mlp")
    with pytest.raises(remat.InfeasibleBudget):
        compare_training("mlp", make, steps=2, device="cpu", budget="0.01x", seed=0)
    facts = compare_training("mlp", make, steps=2, device="cpu", budget="0.01x", seed=0, or_least=True).facts
    assert facts.same_losses and facts.within_budget
    assert facts.note.startswith("0.01x cannot be had on this device, so ") and "below the floor" in facts.note


def test_a_slow_machine_is_shown_a_smaller_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "LONGEST_STEP_S", 0.0)
    assert len(demo._sized("mlp", scale="tiny", device="cpu", seed=0)().args[0]) == demo.SMALLEST_BATCH
    monkeypatch.setattr(demo, "LONGEST_STEP_S", 1e9)
    whole = zoo.build("mlp").args[0]
    assert len(demo._sized("mlp", scale="tiny", device="cpu", seed=0)().args[0]) == len(whole)


@pytest.mark.parametrize("arguments", [("--help",), ("solve", "--help"), ("plan", "--help")])
def test_help_needs_no_torch(arguments: tuple[str, ...]) -> None:
    code = "import sys; sys.modules['torch'] = None; from remat.cli import main; main()"
    command = [sys.executable, "-c", code, *arguments]
    assert subprocess.run(command, capture_output=True, check=False, env={**os.environ}).returncode == 0


def test_plan_writes_a_report_of_what_it_made(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    result = run("plan", "mlp", "-b", "0.6x", "--device", "cpu", "--report", tmp_path / "mlp.html")
    assert result.exit_code == 0, result.stderr
    assert "mlp trains in" in (tmp_path / "mlp.html").read_text()


def test_report_of_an_unknown_kind_is_refused_before_planning(tmp_path: Path) -> None:
    result = run("plan", "mlp", "-b", "0.6x", "--report", tmp_path / "mlp.gif")
    assert result.exit_code == 2
    assert "let it end in one of" in result.stderr and "Planning" not in result.stderr
