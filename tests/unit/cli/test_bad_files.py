"""Files at the edge of sense through the command line: a right answer or one clear line, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from remat.cli import app


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, ["solve", *map(str, arguments), "--time-limit", "1"])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    return result


def chain(count: int, **fields: object) -> list[dict[str, Any]]:
    """A chain whose last node also reads the first."""
    nodes = []
    for number in range(count):
        inputs = sorted({number - 1, 0}) if number == count - 1 > 0 else [number - 1] if number else []
        nodes.append({"name": f"n{number}", "time": 1, "bytes": 10, "inputs": inputs, **fields})
    return nodes


def written(path: Path, nodes: list[dict[str, Any]], outputs: list[int], name: str = "") -> Path:
    document = {"format": "remat-instance", "version": 1, "name": name, "nodes": nodes, "outputs": outputs}
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "odd.json"


@pytest.mark.parametrize(
    ("nodes", "outputs", "budget", "time", "peak"),
    [
        ([], [], 1, 0, 0),
        (chain(1), [0], 10, 1, 10),
        (chain(1), [], 10, 1, 10),
        (chain(5, bytes=0), [4], "1x", 5, 0),
        (chain(5, time=0), [4], "1x", 0, 30),
        (chain(5, time=0, bytes=0), [4], 1, 0, 0),
        (chain(5, bytes=2**59), [4], "1x", 5, 3 * 2**59),
        (chain(5, time=2**62), [4], "1x", 5 * 2**62, 30),
        (chain(5), [4], "1e30", 5, 30),
        ([*chain(3), *chain(1)], [2, 3], "1x", 4, 30),
    ],
)
def test_odd_but_possible_files_have_a_right_answer(
    path: Path, nodes: list[dict[str, Any]], outputs: list[int], budget: object, time: float, peak: int
) -> None:
    result = run(written(path, nodes, outputs), "--budget", budget, "--json")
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert (facts["status"], facts["time"], facts["peak"]) == ("OPTIMAL", time, peak)
    assert facts["schedule"] == list(range(len(nodes)))


@pytest.mark.parametrize(
    ("nodes", "outputs", "message"),
    [
        (chain(3, bytes=2**61), [2], "Sizes add up to more than 2**62"),
        (chain(3, bytes=2**63), [2], "`bytes` must be an integer"),
        (chain(3, time=1e30), [2], "`time` must be a finite number"),
        (chain(3, time=-1), [2], "`time` must be a finite number"),
        (chain(3, bytes=-1), [2], "`bytes` must be an integer"),
        (chain(3, time=float("nan")), [2], "NaN is not a JSON number"),
        (chain(3, bytes=float("inf")), [2], "Infinity is not a JSON number"),
        (chain(3), [7], "Output 7 is produced by no op"),
        (chain(3), [-1], "`outputs` must be a list of integers"),
        ([*chain(2), {"time": 1, "bytes": 1, "inputs": [2]}], [2], "topological order"),
        ([{"time": 1, "bytes": 1, "inputs": [1]}, {"time": 1, "bytes": 1, "inputs": [0]}], [1], "topological order"),
        (chain(2, name="\ud800"), [1], "`name` must be a string of whole characters"),
    ],
)
def test_impossible_file_is_one_clear_line(
    path: Path, nodes: list[dict[str, Any]], outputs: list[int], message: str
) -> None:
    for request in (("--budget", "1x"), ("--sweep", 2)):
        result = run(written(path, nodes, outputs), *request, "--json")
        assert result.exit_code == 1
        assert result.stdout == ""
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("budget", ["0", "-5", "nan", "inf", "9e999", "0x", "-0.5x", "", "1e", "5 parsecs"])
def test_budget_that_is_no_amount_is_a_usage_error(path: Path, budget: str) -> None:
    result = run(written(path, chain(3), [2]), f"--budget={budget}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "budget" in result.stderr


def test_budget_of_exactly_the_floor_and_one_byte_less(path: Path) -> None:
    file = written(path, chain(3), [2])
    assert run(file, "--budget", 30).exit_code == 0
    result = run(file, "--budget", 29)
    assert result.exit_code == 3
    assert "below the floor of 30" in result.stderr


@pytest.mark.parametrize("options", [("--seed", -3), ("--seed", 2**70), ("--gap", 0), ("--gap", 5)])
def test_odd_options_are_answered(path: Path, options: tuple[object, ...]) -> None:
    assert run(written(path, chain(6), [5]), "--budget", 30, *options).exit_code == 0


@pytest.mark.parametrize("options", [("--time-limit", -1), ("--gap", -0.1), ("--seed", "one"), ("--gap", "small")])
def test_option_out_of_range_is_a_usage_error(path: Path, options: tuple[object, ...]) -> None:
    arguments = ["solve", str(written(path, chain(3), [2])), "--budget", "1x", *map(str, options)]
    assert CliRunner().invoke(app, arguments).exit_code == 2


@pytest.mark.parametrize("request_", [("--budget", "1x"), ("--sweep", 2)])
def test_name_that_looks_like_markup_is_shown_as_it_is(path: Path, request_: tuple[object, ...]) -> None:
    result = run(written(path, chain(3), [2], name="[/b][red]"), *request_)
    assert result.exit_code == 0
    assert "[/b][red]" in result.stdout


def test_name_with_terminal_codes_cannot_reach_the_terminal(path: Path) -> None:
    result = run(written(path, chain(1, name="a\n\x1b[31m"), [0]), "--budget", 1)
    assert result.exit_code == 3
    assert "\x1b" not in result.stderr
    assert "`a ?[31m`" in result.stderr
