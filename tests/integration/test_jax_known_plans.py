"""Plans of jax that another process found: one compilation, nothing solved; a wrong file costs a search."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax")
from tests.support.jax_models import Case, mlp, scanned_mlp

import remat.jax
from remat.jax import loop

SCRIPT = """
import json, sys
from tests.support import jax_models
import remat.jax
from remat.jax import loop, planning

def refuse(*args):
    raise AssertionError("searched again")

planning.search = planning.plain_memory = loop.solve_within = refuse
loss, parameters, batch = getattr(jax_models, sys.argv[1])()
optimized = remat.jax.optimize(loss, "0.6x", time_limit_s=1.0)
found = optimized.plan_for(parameters, *batch)
agrees = remat.jax.verify(loss, optimized, parameters, *batch).ok
print(json.dumps([found.compilations, found.plan.predicted_peak, found.plan.budget_bytes, agrees]))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    return tmp_path / "jax"


def prepared(case: Case, budget: str = "0.6x") -> Any:
    loss, parameters, batch = case
    return remat.jax.optimize(loss, budget, time_limit_s=1.0).plan_for(parameters, *batch)


@pytest.mark.slow
@pytest.mark.parametrize("case", [mlp, scanned_mlp])
def test_second_process_compiles_once_and_solves_nothing(case: Any, folder: Path) -> None:
    first = prepared(case())
    assert len(list(folder.iterdir())) == 1
    result = subprocess.run([sys.executable, "-c", SCRIPT, case.__name__], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    compilations, peak, budget, agrees = json.loads(result.stdout.splitlines()[-1])
    assert (compilations, budget, agrees) == (1, first.plan.budget_bytes, True)
    assert first.plan.predicted_peak * 0.95 <= peak <= budget


def test_other_budgets_and_options_have_plans_of_their_own(folder: Path) -> None:
    case = mlp()
    loose = prepared(case, "0.9x")
    assert prepared(case, "0.6x").plan.budget_bytes < loose.plan.budget_bytes
    assert len(list(folder.iterdir())) == 2


def test_damaged_file_is_told_and_the_step_planned_again(folder: Path) -> None:
    case = mlp()
    plan = prepared(case).plan
    (path,) = folder.iterdir()
    fields = json.loads(path.read_text())
    fields["plan"]["solution"]["peak_bytes"] += 1
    path.write_text(json.dumps(fields))
    with pytest.warns(UserWarning, match="cannot be read .* the step is planned again"):
        again = prepared(case).plan
    assert again.budget_bytes == plan.budget_bytes
    assert json.loads(path.read_text())["plan"]["solution"]["peak_bytes"] == again.solution.peak_bytes


def test_plan_that_no_longer_fits_is_searched_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = mlp()
    prepared(case)
    (path,) = folder.iterdir()
    fields = json.loads(path.read_text())
    fields["plan"]["problem"]["budget_bytes"] //= 2
    path.write_text(json.dumps(fields))
    searched: list[int] = []
    monkeypatch.setattr("remat.jax.planning.search", lambda *args: searched.append(1) or loop.search(*args))
    found = prepared(case)
    assert searched == [1] and found.plan.predicted_peak <= found.plan.budget_bytes
