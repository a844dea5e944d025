"""`remat layout`: what it prints and writes, exit codes, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from remat.cli import app

TEXT = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n"
"""The example of MiniMalloc's documentation: it fits into 12 and not into less."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "buffers.csv"
    path.write_text(TEXT)
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["layout", *map(str, arguments)])


def test_offsets_are_written_beside_the_buffers(file: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    result = run(file, "--capacity", 12, "--output", output)
    assert result.exit_code == 0
    assert "OPTIMAL" in result.stdout
    lines = output.read_text().splitlines()
    assert lines[0] == "id,lower,upper,size,offset"
    assert [line.rsplit(",", 1)[0] for line in lines] == TEXT.splitlines()


@pytest.mark.parametrize("solver", ["auto", "exact", "size", "best_fit", "first_fit"])
def test_json_tells_height_load_and_offsets(file: Path, solver: str) -> None:
    facts = json.loads(run(file, "--capacity", 12, "--solver", solver, "--json").stdout)
    assert (facts["height"], facts["load"], facts["bound"], facts["capacity"]) == (12, 12, 12, 12)
    assert facts["status"] == "OPTIMAL"
    assert facts["solver"] == solver
    assert set(facts["offsets"]) == {"b1", "b2", "b3", "b4", "b5"}


def test_without_a_capacity_the_lowest_is_found(file: Path) -> None:
    facts = json.loads(run(file, "--json").stdout)
    assert (facts["height"], facts["capacity"]) == (12, None)


def test_capacity_below_the_load_is_refused_with_the_proof(file: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    result = run(file, "--capacity", 11, "--output", output, "--json")
    assert result.exit_code == 3
    assert "proven, every one needs at least 12" in result.stderr
    assert json.loads(result.stdout)["status"] == "INFEASIBLE"
    assert not output.exists()


def test_buffer_larger_than_the_capacity_is_named_with_its_line(file: Path) -> None:
    result = run(file, "--capacity", 3)
    assert result.exit_code == 3
    assert "line 2" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--capacity", 0), 2, "must be above zero"),
        (("--solver", "exakt"), 2, "did you mean 'exact'?"),
        (("--output", "/no/such/folder/out.csv"), 1, "no folder"),
    ],
)
def test_bad_request_is_one_sentence(file: Path, arguments: tuple[object, ...], code: int, message: str) -> None:
    result = run(file, *arguments)
    assert result.exit_code == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_malformed_file_is_one_sentence_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("id,lower,upper,size\na,0,4,1\nb,7,7,1\n")
    result = run(path, "--capacity", 10)
    assert result.exit_code == 1
    assert "line 3" in result.stderr
    assert result.stderr.count("remat: error") == 1


def test_empty_problem_has_no_height(tmp_path: Path) -> None:
    path = tmp_path / "empty.csv"
    path.write_text("id,lower,upper,size\n")
    assert json.loads(run(path, "--json").stdout)["height"] == 0
