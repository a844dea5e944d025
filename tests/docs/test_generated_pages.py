"""Pages that are made from results, commands and names agree with them."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from benchmarks.tables import made
from tests.docs.pages import DOCS, ROOT, name_of

import remat

RESULTS = ROOT / "benchmarks" / "results"
SCRIPT = runpy.run_path(str(DOCS / "write_benchmarks.py"))


@pytest.mark.parametrize("page", SCRIPT["PAGES"], ids=name_of)
def test_benchmark_tables_are_those_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- table: ") == text.count("<!-- end -->") > 0
    assert SCRIPT["fill"](text) == text, "run `make docs-pages`"


def test_every_results_file_has_a_table_on_the_page() -> None:
    shown = set(re.findall(r"<!-- table: ([\w.-]+) -->", (DOCS / "benchmarks.md").read_text(encoding="utf-8")))
    names = {path.name for path in RESULTS.glob("*.json")} - {"runs.json"}
    assert {name.removesuffix(".json") for name in names} <= shown
    runs = json.loads((RESULTS / "runs.json").read_text(encoding="utf-8"))
    assert names == runs.keys(), "each file's date, machine, torch and command"
    assert all(all(run.get(key) for key in ("date", "machine", "torch", "command")) for run in runs.values())


def test_saving_results_notes_how_they_were_made(tmp_path: Path) -> None:
    from benchmarks.runs import read_runs, save_results

    save_results(tmp_path / "a" / "one.json", [1, 2])
    save_results(tmp_path / "a" / "two.json", {}, "NVIDIA H200")
    assert json.loads((tmp_path / "a" / "one.json").read_text(encoding="utf-8")) == [1, 2]
    runs = read_runs(tmp_path / "a")
    assert runs["one.json"]["machine"].startswith("CPU, ") and runs["two.json"]["machine"] == "NVIDIA H200"
    assert runs["one.json"]["date"] == date.today().isoformat() and "python" in runs["one.json"]["command"]


def test_a_changed_result_changes_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = tmp_path / "results"
    shutil.copytree(RESULTS, copied)
    path = copied / "frontier_gpt2-medium.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    for row in found["rows"]:
        row["peak_bytes"] = row["peak_bytes"] and row["peak_bytes"] + 2**30
    path.write_text(json.dumps(found), encoding="utf-8")
    monkeypatch.setattr(made, "RESULTS", copied)
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    assert SCRIPT["fill"](page) != page


@pytest.mark.parametrize(
    ("fields", "recorded"),
    [
        ({"device": "NVIDIA H200"}, {"machine": "NVIDIA H200"}),
        ({"date": "2026-11-16", "command": "make bench"}, {"date": "2026-11-16", "command": "`make bench`"}),
        ([], {}),
    ],
    ids=["machine", "date and command", "a list"],
)
def test_origin_says_what_a_file_records_and_what_not(
    fields: Any, recorded: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(fields), encoding="utf-8")
    monkeypatch.setattr(made, "RESULTS", tmp_path)
    titles = ("date", "machine", "torch", "command")
    line = " · ".join(f"{title}: {recorded.get(title, 'not recorded')}" for title in titles)
    assert made.origin("a.json") == f"`a.json` · {line}"


def test_reference_of_the_command_line_is_that_of_the_commands() -> None:
    script = runpy.run_path(str(DOCS / "write_command_line.py"))
    text = script["PAGE"].read_text(encoding="utf-8")
    assert text.count("\n## remat ") >= 12
    assert script["fill"](text) == text, "run `make docs-pages`"


def test_reference_of_python_has_every_public_name_and_no_other() -> None:
    listed = re.findall(
        r"^::: remat\.(\w+)$", (DOCS / "reference" / "python.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(listed) == sorted(remat.__all__)
