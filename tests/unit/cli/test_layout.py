"""`remat layout`: what it prints and writes, exit codes, and clear refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.reports import PLAN
from typer.testing import CliRunner, Result

from remat.cli import app
from remat.core import Plan, Status, plain_schedule, save_problem
from remat.layout import lifetimes
from remat.layout.synthetic import dissected

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


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    return path


def test_a_plan_is_laid_out_as_it_is_scheduled(plan_file: Path, tmp_path: Path) -> None:
    plan = Plan.load(plan_file)
    assert plan.schedule is not None
    output = tmp_path / "out.csv"
    facts = json.loads(run(plan_file, "--json", "--output", output).stdout)
    buffers = lifetimes(plan.problem, plan.schedule)
    assert facts["load"] == plan.solution.peak_bytes - plan.problem.resident_bytes <= facts["height"]
    assert facts["total"] == sum(buffer.size for buffer in buffers)
    assert set(facts["offsets"]) == {buffer.id for buffer in buffers}
    assert len(output.read_text().splitlines()) == len(buffers) + 1
    assert "what they would take apart" in run(plan_file).stdout


def test_a_problem_is_laid_out_in_its_own_order(tmp_path: Path) -> None:
    problem = PLAN.problem
    path = tmp_path / "problem.json"
    save_problem(problem, path)
    assert json.loads(run(path, "--json").stdout)["buffers"] == len(lifetimes(problem, plain_schedule(problem.graph)))


def test_a_plan_that_does_not_fit_the_capacity_is_refused(plan_file: Path) -> None:
    load = json.loads(run(plan_file, "--json").stdout)["load"]
    result = run(plan_file, "--capacity", load - 1)
    assert (result.exit_code, result.stdout) == (3, "")
    assert f"at least {load}" in result.stderr
    tiny = run(plan_file, "--capacity", 1)
    assert tiny.exit_code == 3
    assert "is larger than the capacity 1; raise the capacity" in tiny.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not complete JSON"),
        ('{"format": "remat-pareto", "version": 1}', "a file of format"),
        ("[]", "no JSON"),
    ],
)
def test_a_foreign_json_file_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    result = run(path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_plan_without_a_schedule_has_nothing_to_lay_out(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    replace(PLAN, solution=replace(PLAN.solution, status=Status.INFEASIBLE, schedule=None)).save(path)
    result = run(path)
    assert result.exit_code == 1
    assert "without a schedule" in result.stderr


@pytest.mark.parametrize(
    ("rows", "line", "message"),
    [
        ("a,0,4,1\na,5,6,1\n", 3, "the id a is also that of line 2"),
        ("a,4,4,1\n", 2, "its upper end must be above its lower end"),
        ("a,9,4,1\n", 2, "its upper end must be above its lower end"),
        ("a,0,4,1\nb,0,4,0\n", 3, "has the size 0"),
        ("a,0,4,eight\n", 2, "must be a whole number"),
        ("a,0,4\n", 2, "there are 3 fields"),
        ('a,0,4,"1\n', 2, "unexpected end of data"),
    ],
)
def test_bad_rows_are_one_sentence_with_the_line(tmp_path: Path, rows: str, line: int, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(f"id,lower,upper,size\n{rows}")
    result = run(path, "--capacity", 10, "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"line {line}" in result.stderr.replace("\n", " ")
    assert message in " ".join(result.stderr.split())
    assert result.stderr.count("remat: error") == 1
    assert "Traceback" not in result.stderr


def test_what_may_still_fit_is_told_with_the_best_height_found(tmp_path: Path) -> None:
    problem = dissected(60, seed=2)
    path = tmp_path / "hard.csv"
    lines = [f"{b.id},{b.lower},{b.upper},{b.size}\n" for b in problem.buffers]
    path.write_text("id,lower,upper,size\n" + "".join(lines))
    result = run(path, "--capacity", problem.capacity, "--solver", "first_fit", "--json")
    facts = json.loads(result.stdout)
    assert (result.exit_code, facts["status"]) == (3, "OVER")
    assert facts["height"] > facts["capacity"] >= facts["bound"]
    assert f"the lowest found needs {facts['height']}" in " ".join(result.stderr.split())
