"""`remat solve`: the JSON object of the instance format, exit codes, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import remat
from remat.cli import app
from remat.core import OpId, Schedule, load_problem, naive_peak_bytes

KEYS = [
    "status",
    "solver",
    "time",
    "base_time",
    "bound",
    "gap",
    "peak",
    "budget",
    "min_budget",
    "seconds",
    "schedule",
]


@pytest.fixture
def instance(tmp_path: Path) -> Path:
    """A chain of four forward and four backward nodes, each backward node reading its forward node."""
    nodes = [{"name": f"f{i}", "time": 10, "bytes": 100, "inputs": [i - 1] if i else []} for i in range(4)]
    for i in range(4, 8):
        inputs = sorted({i - 1, 7 - i})
        nodes.append({"name": f"b{i}", "time": 20, "bytes": 100, "inputs": inputs, "backward": True})
    path = tmp_path / "chain.json"
    path.write_text(
        json.dumps({"format": "remat-instance", "version": 1, "name": "chain", "nodes": nodes, "outputs": [7]})
    )
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["solve", *map(str, arguments)])


def test_json_has_exactly_the_documented_fields(instance: Path) -> None:
    result = run(instance, "--budget", 1000, "--json")
    assert result.exit_code == 0
    assert list(json.loads(result.stdout)) == KEYS


def test_enough_memory_is_optimal_without_recomputation(instance: Path) -> None:
    facts = json.loads(run(instance, "--budget", "1x", "--json").stdout)
    assert (facts["status"], facts["time"], facts["base_time"], facts["gap"]) == ("OPTIMAL", 120, 120, 0.0)
    assert facts["schedule"] == list(range(8))


def test_fraction_is_of_the_peak_of_file_order(instance: Path) -> None:
    facts = json.loads(run(instance, "--budget", "0.8x", "--json").stdout)
    assert facts["budget"] == 400
    assert facts["peak"] <= 400


def test_schedule_has_the_peak_it_claims(instance: Path) -> None:
    facts = json.loads(run(instance, "--budget", 400, "--json").stdout)
    schedule = Schedule(tuple(OpId(step) for step in facts["schedule"]))
    assert naive_peak_bytes(load_problem(instance), schedule) == facts["peak"] <= 400


def test_table_goes_to_stdout_and_progress_to_stderr(instance: Path) -> None:
    result = run(instance, "--budget", "400")
    assert "smallest known budget" in result.stdout
    assert "Solving chain.json (8 ops)" in result.stderr
    assert "\x1b[" not in result.output


def test_smallest_budget_is_below_the_peak_of_a_loose_schedule(instance: Path) -> None:
    facts = json.loads(run(instance, "--budget", "1x", "--json").stdout)
    assert facts["min_budget"] < facts["peak"]


def test_infeasible_budget_exits_3_with_the_smallest_one(instance: Path) -> None:
    result = run(instance, "--budget", 100, "--json")
    facts = json.loads(result.stdout)
    assert result.exit_code == 3
    assert (facts["status"], facts["schedule"]) == ("INFEASIBLE", None)
    assert facts["min_budget"] >= 300
    assert list(facts) == KEYS
    assert result.stderr.splitlines()[-1].startswith("remat: error: Budget 100 B is below")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--budget", "lots"), 2, "Cannot read the budget 'lots'"),
        (("--budget", "80%"), 2, "is a share of a device, and a file has none"),
        (("--budget", "1x", "--solver", "magic"), 2, "There is no solver `magic`"),
    ],
)
def test_bad_option_is_one_clear_line(instance: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
    result = run(instance, *arguments)
    assert result.exit_code == code
    assert result.stdout == ""
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_missing_budget_is_a_usage_error(instance: Path) -> None:
    assert run(instance).exit_code == 2


@pytest.mark.parametrize("content", ["", "{", '{"format": "other"}', "[]", '{"format": "remat-instance"}'])
def test_damaged_file_is_one_clear_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "damaged.json"
    path.write_text(content)
    result = run(path, "--budget", 1)
    assert result.exit_code == 1
    assert result.stderr.startswith("remat: error: ")
    assert len(result.stderr.splitlines()) == 1


def test_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    result = run(tmp_path / "absent.json", "--budget", 1)
    assert result.exit_code == 1
    assert "absent.json" in result.stderr


def test_version_is_printed() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"remat {remat.__version__}\n"
