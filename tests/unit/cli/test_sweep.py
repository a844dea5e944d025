"""`remat solve --sweep`: every solver at falling budgets, as tables, a curve, a picture and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from remat.cli import app
from remat.core import floor_bytes, save_problem
from remat.core.search.limits import Limits
from remat.errors import MissingExtra
from remat.solvers import REGISTRY
from remat.solvers.strategies.none import KeepAll
from remat.solvers.sweep import plain_peak_bytes, sweep, sweep_budgets
from remat.zoo.synthetic import chain

PROBLEM = chain(4)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "chain.json"
    save_problem(PROBLEM, path)
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["solve", *map(str, arguments), "--time-limit", "0.3"])


def test_budgets_fall_from_the_plain_peak_to_just_above_the_floor() -> None:
    budgets = sweep_budgets(PROBLEM, 12)
    assert len(budgets) == 12
    assert budgets == tuple(sorted(budgets, reverse=True))
    assert budgets[0] == plain_peak_bytes(PROBLEM)
    assert budgets[-1] == pytest.approx(1.02 * floor_bytes(PROBLEM)[0], abs=1)


def test_single_budget_is_the_plain_peak() -> None:
    assert sweep_budgets(PROBLEM, 1) == (plain_peak_bytes(PROBLEM),)


def test_budgets_that_fall_together_come_once() -> None:
    assert len(sweep_budgets(chain(0), 12)) < 12


def test_json_has_every_solver_at_every_budget(file: Path) -> None:
    result = run(file, "--sweep", 3, "--json")
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert list(facts) == ["name", "ops", "base_time", "plain_peak", "floor", "points"]
    found = {(point["budget"], point["solver"]) for point in facts["points"]}
    assert found == {(budget, solver.name) for budget in sweep_budgets(PROBLEM, 3) for solver in REGISTRY}


def test_points_fit_their_budget_and_respect_every_bound(file: Path) -> None:
    points = json.loads(run(file, "--sweep", 4, "--json").stdout)["points"]
    for point in points:
        if point["status"] == "INFEASIBLE":
            assert (point["time"], point["peak"], point["overhead"]) == (None, None, None)
            continue
        assert point["peak"] <= point["budget"]
        others = [other for other in points if other["budget"] == point["budget"] and other["time"] is not None]
        assert all(point["bound"] <= other["time"] * (1 + 1e-6) for other in others)


def test_plain_peak_costs_nothing_with_auto(file: Path) -> None:
    points = json.loads(run(file, "--sweep", 2, "--solver", "auto", "--json").stdout)["points"]
    assert (points[0]["solver"], points[0]["overhead"]) == ("auto", 0.0)


def test_chosen_solvers_alone_take_part(file: Path) -> None:
    result = run(file, "--sweep", 2, "--solver", "sqrt_n", "--solver", "none", "--json")
    assert [point["solver"] for point in json.loads(result.stdout)["points"]] == ["sqrt_n", "none"] * 2


def test_tables_and_curve_go_to_stdout_and_points_to_stderr(file: Path) -> None:
    result = run(file, "--sweep", 3)
    assert result.exit_code == 0
    assert {"budget", "share", "auto", "bound", "gap", "seconds"} <= set(result.stdout.split())
    assert all(solver.name in result.stdout for solver in REGISTRY)
    assert "proven bound" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 120
    assert len([line for line in result.stderr.splitlines() if " s" in line]) == 3 * len(REGISTRY)


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_curve_is_drawn_in_the_format_of_its_suffix(file: Path, tmp_path: Path, suffix: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"curve.{suffix}"
    assert run(file, "--sweep", 2, "--solver", "auto", "--solver", "none", "--output", picture).exit_code == 0
    assert picture.read_bytes().startswith(magic)


def test_empty_graph_is_swept(tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    path.write_text(json.dumps({"format": "remat-instance", "version": 1, "nodes": [], "outputs": []}))
    assert run(path, "--sweep", 3).exit_code == 0


def test_missing_library_leaves_a_solver_out() -> None:
    class Missing(KeepAll):
        def solve(self, *_: object, **__: object):
            raise MissingExtra("install `remat[solvers]`")

    (point,) = sweep(PROBLEM, [Missing()], [1], Limits(1.0))
    assert (point.solution, point.reason) == (None, "install `remat[solvers]`")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "either --budget, or --sweep"),
        (("--budget", "1x", "--sweep", 2), "either --budget, or --sweep"),
        (("--budget", "1x", "--solver", "none", "--solver", "full"), "use --sweep to compare"),
        (("--budget", "1x", "--output", "a.png"), "use --sweep"),
        (("--sweep", 2, "--output", "a.gif"), "a picture ends in .png or .svg"),
        (("--sweep", 2, "--solver", "magic"), "There is no solver `magic`"),
        (("--sweep", 0), "--sweep"),
        (("--sweep", "two"), "--sweep"),
    ],
)
def test_bad_request_is_a_usage_error(file: Path, arguments: tuple[object, ...], message: str) -> None:
    result = run(file, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.output


def test_output_in_a_missing_folder_is_refused_before_solving(file: Path, tmp_path: Path) -> None:
    result = run(file, "--sweep", 2, "--output", tmp_path / "nowhere" / "a.png")
    assert result.exit_code == 1
    assert "there is no folder" in result.stderr
