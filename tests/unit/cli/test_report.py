"""`remat report`: files in, one report out; what is wrong is said in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.reports import PLAN, curve, measured
from typer.testing import CliRunner, Result

from remat.cli import app


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, ["report", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    PLAN.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_page_is_written_beside_the_plan(plan_file: Path) -> None:
    result = run(plan_file)
    assert result.exit_code == 0, result.stderr
    assert "less memory" in result.stdout and "What it costs." in result.stdout
    assert "Wrote" in result.stderr
    assert plan_file.with_suffix(".html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("form", "name"), [("trace", "plan.trace.json"), ("json", "plan.report.json"), ("snapshot", "plan.pickle")]
)
def test_format_chooses_the_file(plan_file: Path, form: str, name: str) -> None:
    facts = json.loads(run(plan_file, "--format", form, "--json").stdout)
    assert facts["report"] == str(plan_file.with_name(name))
    assert facts["bytes"] == plan_file.with_name(name).stat().st_size
    assert facts["headline"].startswith("transformer trains")


def test_plan_profiles_and_curve_make_one_report(plan_file: Path) -> None:
    folder = plan_file.parent
    measured("plain").save(folder / "before.json")
    measured("planned").save(folder / "after.json")
    curve().save(folder / "curve.json")
    files = [folder / name for name in ("before.json", "plan.json", "after.json", "curve.json")]
    result = run(*files, "-o", folder / "all.json", "--name", "mine")
    assert result.exit_code == 0, result.stderr
    facts = json.loads((folder / "all.json").read_text())
    assert (facts["name"], len(facts["steps"]), facts["curve"]["name"]) == ("mine", 2, "small")


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["nothing.json"], "Cannot read", 1),
        (["plan.json", "-o", "a.gif"], "let it end in one of", 2),
        (["plan.json", "--format", "gif"], "No report format is called 'gif'", 2),
        (["plan.json", "plan.json"], "holds one Plan", 2),
        (["plan.json", "-o", "plan.json"], "would overwrite", 2),
        (["plan.json", "-o", "missing/a.html"], "there is no folder", 1),
        (["odd.json"], "format", 1),
    ],
)
def test_bad_requests_are_one_line(
    plan_file: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str, code: int
) -> None:
    monkeypatch.chdir(plan_file.parent)
    Path("odd.json").write_text('{"format": "remat-costs", "version": 1}')
    result = run(*arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (code, 1)
    assert words in result.stderr
    assert not Path("a.gif").exists()
