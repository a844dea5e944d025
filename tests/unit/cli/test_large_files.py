"""Files that are too large, and large ones that are not: refused at once with their size, or answered in time."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import remat.core.document
import remat.core.files.problem_file
import remat.layout.csv_file
from remat.cli import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def one_line(result: Result) -> str:
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    return line


def write_chain(path: Path, count: int) -> Path:
    """A chain there and back: the second half reads the first in reverse."""
    nodes = []
    for number in range(count):
        inputs = sorted({number - 1, count - 1 - number} - {-1} - set(range(number, count)))
        nodes.append({"time": 1 + number % 7, "bytes": 10, "inputs": inputs, "backward": number >= count // 2})
    path.write_text(json.dumps({"format": "remat-instance", "version": 1, "nodes": nodes, "outputs": [count - 1]}))
    return path


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("file.json", ("solve", "--budget", "1x")),
        ("file.json", ("layout",)),
        ("file.csv", ("layout",)),
        ("file.json", ("report",)),
    ],
)
def test_file_that_is_too_large_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, command: tuple[str, ...]
) -> None:
    path = tmp_path / name
    with path.open("wb") as file:
        # A hole in a file takes no room on the disk.
        file.truncate(10 * 2**30)
    monkeypatch.setattr(json, "loads", None)
    line = one_line(run(command[0], path, *command[1:]))
    assert "is too large: it has 10.00 GiB, and files of up to 64.00 MiB are read" in line


def test_endless_pipe_is_refused_as_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remat.core.document, "MAX_FILE_BYTES", 2**20)
    assert "is too large: it has more" in one_line(run("solve", "/dev/zero", "--budget", "1x"))


def test_problem_of_too_many_nodes_is_refused_with_both_numbers(tmp_path: Path) -> None:
    most = remat.core.files.problem_file.MAX_OPS
    path = tmp_path / "many.json"
    nodes = [{"time": 1, "bytes": 1, "inputs": []}] * (most + 1)
    path.write_text(json.dumps({"format": "remat-instance", "version": 1, "nodes": nodes, "outputs": []}))
    for command in (("solve", "--budget", "1x"), ("layout",)):
        line = one_line(run(command[0], path, *command[1:]))
        assert f"is too large: it has {most + 1} nodes, and problems of up to {most} are solved" in line


def test_problem_of_too_many_inputs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remat.core.files.problem_file, "MAX_READS", 10)
    line = one_line(run("solve", write_chain(tmp_path / "chain.json", 20), "--budget", "1x"))
    assert "inputs of all of them together, and problems of up to 10 are solved" in line


def test_too_many_buffers_are_refused_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remat.layout.csv_file, "MAX_BUFFERS", 3)
    path = tmp_path / "buffers.csv"
    path.write_text("id,lower,upper,size\n" + "".join(f"{number},0,1,1\n" for number in range(4)))
    assert "has 4 buffers, and files of up to 3 are read" in one_line(run("layout", path))


def test_list_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remat.core.document, "MAX_ITEMS", 15)
    line = one_line(run("solve", write_chain(tmp_path / "chain.json", 20), "--budget", "1x"))
    assert "`nodes` lists 20 items, and lists of up to 15 are read" in line


def test_large_instance_is_answered_at_its_time_limit(tmp_path: Path) -> None:
    path = write_chain(tmp_path / "chain.json", 8_000)
    start = time.process_time()
    result = run("solve", path, "--budget", "0.5x", "--time-limit", 0.5, "--json")
    # Of the processor alone: the machine may have other things to do.
    assert time.process_time() - start < 0.5 + 5
    assert result.exit_code == 0
    assert json.loads(result.stdout)["peak"] <= json.loads(result.stdout)["budget"]
