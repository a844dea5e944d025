"""Code on the pages runs: Python blocks of a page in one namespace, and shell lines that are marked as runnable."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.docs.pages import DOCS, PAGES, ROOT, blocks_of, name_of

from remat.core import load_problem, plain_schedule
from remat.core.search.limits import Limits

pytest.importorskip("torch")

NO_RUN = "no-run: "
MOST_NOT_RUN = 7
WITH_CODE = (*PAGES, ROOT / "CONTRIBUTING.md")
WITH_PYTHON = [page for page in WITH_CODE if any(block.language == "python" for block in blocks_of(page))]
RUN = [
    page for page in WITH_PYTHON if any(block.language == "python" and not block.marker for block in blocks_of(page))
]
SHELL_LINES = [
    line.partition(" #")[0].strip()
    for page in PAGES
    for block in blocks_of(page)
    if block.language == "sh" and block.marker == "runnable"
    for line in block.text.splitlines()
    if line.strip()
]


@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_python_of_a_page_runs_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    for library in ("transformers", "accelerate", "lightning", "peft", "jax", "keras"):
        if f"import {library}" in page.read_text(encoding="utf-8"):
            pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    # Dynamo looks functions up in the module that they say they are from, and keeps it by name: each page has its own.
    name = re.sub(r"\W", "_", name_of(page))
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    blocks = [block for block in blocks_of(page) if block.language == "python" and not block.marker.startswith(NO_RUN)]
    for block in blocks:
        # Errors then name the page and its line.
        exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), vars(module))
    assert len(vars(module)) > len(vars(ModuleType(name)))


def test_solver_of_the_guide_solves_a_problem() -> None:
    (block,) = [block for block in blocks_of(ROOT / "CONTRIBUTING.md") if block.language == "python"]
    module: dict[str, Any] = {"__name__": __name__}
    exec(compile(block.text, "CONTRIBUTING.md", "exec"), module)
    problem = load_problem(ROOT / "benchmarks" / "instances" / "mlp.json")
    solution = module["MySolver"]().solve(problem, Limits(1.0))
    assert (solution.solver, solution.schedule) == ("my_solver", plain_schedule(problem.graph))


def test_blocks_that_do_not_run_are_few_say_why_and_compile() -> None:
    blocks = [block for page in WITH_PYTHON for block in blocks_of(page) if block.language == "python"]
    marked = [block for block in blocks if block.marker not in ("", "setup")]
    assert 0 < len(marked) <= MOST_NOT_RUN
    for block in marked:
        assert block.marker.startswith(NO_RUN) and len(block.marker.split()) > 2, block.marker
        assert compile(block.text, "block", "exec").co_code


def test_readme_quickstart_and_how_tos_have_code_that_runs() -> None:
    expected = {ROOT / "README.md", DOCS / "quickstart.md", *(DOCS / "how-to").glob("*.md")}
    without_python = {"index.md", "rerun-the-classic-experiments.md"}
    assert {page for page in expected if page.name not in without_python} <= set(RUN)


def test_every_fence_has_a_language_and_a_known_marker() -> None:
    strange = [
        f"{name_of(page)}:{block.line}: {block.language} {block.marker}"
        for page in PAGES
        for block in blocks_of(page)
        if (block.language, block.marker) not in {("sh", ""), ("sh", "runnable"), ("python", ""), ("python", "setup")}
        and not (block.language == "python" and block.marker.startswith(NO_RUN))
    ]
    assert strange == []


@pytest.mark.parametrize("line", SHELL_LINES)
def test_shell_line_runs(line: str) -> None:
    program, *arguments = shlex.split(line)
    assert program == "remat"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "remat", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_runnable_shell_lines_are_there() -> None:
    assert len(SHELL_LINES) >= 3
