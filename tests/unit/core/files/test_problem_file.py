from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.contract import graphs

from remat.core import load_instance, load_problem, save_instance, save_problem
from remat.errors import FileFormatError, InvalidGraph

GOOD: dict[str, Any] = {
    "format": "remat-instance",
    "version": 1,
    "name": "pair",
    "nodes": [
        {"name": "a", "time": 3, "bytes": 10, "inputs": [], "backward": False},
        {"name": "b", "time": 2.5, "bytes": 0, "inputs": [0, 0], "backward": True},
    ],
    "outputs": [1],
}


def written(path: Path, **changes: object) -> Path:
    path.write_text(json.dumps({**GOOD, **changes}))
    return path


def with_node(**changes: object) -> list[dict[str, Any]]:
    return [GOOD["nodes"][0], {**GOOD["nodes"][1], **changes}]


def test_reads_nodes_as_ops_with_one_output(tmp_path: Path) -> None:
    instance = load_instance(written(tmp_path / "a.json"))
    assert instance.name == "pair"
    assert [op.outputs for op in instance.graph.ops] == [(0,), (1,)]
    assert instance.graph.ops[1].inputs == (0,)
    assert instance.graph.ops[1].backward
    assert instance.costs.time_ns == (3, 2.5)
    assert isinstance(instance.costs.time_ns[0], int)


def test_round_trips_an_instance(tmp_path: Path) -> None:
    instance = load_instance(written(tmp_path / "a.json"))
    save_instance(instance, tmp_path / "b.json")
    assert load_instance(tmp_path / "b.json") == instance


def test_round_trips_a_problem_with_several_outputs_and_pins(tmp_path: Path) -> None:
    problem = graphs.transformer(3).with_budget(1000)
    save_problem(problem, tmp_path / "p.json")
    assert load_problem(tmp_path / "p.json") == problem


def test_load_problem_reads_instances_too(tmp_path: Path) -> None:
    problem = load_problem(written(tmp_path / "a.json"))
    assert problem.graph == load_instance(tmp_path / "a.json").graph


def test_empty_list_of_nodes_is_an_empty_graph(tmp_path: Path) -> None:
    assert load_instance(written(tmp_path / "a.json", nodes=[], outputs=[])).graph.ops == ()


def test_instance_file_refuses_ops_with_several_outputs(tmp_path: Path) -> None:
    problem = graphs.transformer(1)
    instance = load_instance(written(tmp_path / "a.json"))
    other = type(instance)("t", problem.graph, problem.costs)
    with pytest.raises(InvalidGraph, match="save_problem"):
        save_instance(other, tmp_path / "b.json")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"format": "remat-plan"}, "format"),
        ({"format": 7}, "format"),
        ({"version": 3}, "version 3"),
        ({"version": True}, "version"),
        ({"nodes": 3}, "nodes"),
        ({"nodes": [3]}, "nodes"),
        ({"nodes": with_node(time=-1)}, "time"),
        ({"nodes": with_node(time="3")}, "time"),
        ({"nodes": with_node(time=True)}, "time"),
        ({"nodes": with_node(time=None)}, "time"),
        ({"nodes": with_node(time=10**400)}, "time"),
        ({"nodes": with_node(bytes=-4)}, "bytes"),
        ({"nodes": with_node(bytes=1.5)}, "bytes"),
        ({"nodes": with_node(bytes=2**70)}, "bytes"),
        ({"nodes": with_node(inputs=[1])}, "topological"),
        ({"nodes": with_node(inputs=[5])}, "topological"),
        ({"nodes": with_node(inputs=[-1])}, "inputs"),
        ({"nodes": with_node(inputs=[0.0])}, "inputs"),
        ({"nodes": with_node(inputs="0")}, "inputs"),
        ({"nodes": with_node(backward=1)}, "backward"),
        ({"nodes": with_node(name=3)}, "name"),
        ({"outputs": [2]}, "Output 2"),
        ({"outputs": [1, 1]}, "Output 1"),
        ({"outputs": None}, "outputs"),
    ],
)
def test_refuses_a_bad_field_in_one_sentence(tmp_path: Path, changes: dict[str, object], expected: str) -> None:
    with pytest.raises(FileFormatError, match=expected) as caught:
        load_instance(written(tmp_path / "a.json", **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_refuses_numbers_that_are_not_finite(tmp_path: Path, number: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(GOOD).replace("2.5", number))
    with pytest.raises(FileFormatError):
        load_instance(path)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "\x00", '"x"', "[" * 100_000])
def test_refuses_what_is_not_a_json_object(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(FileFormatError):
        load_instance(path)


def test_refuses_bytes_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"\xff\xfe\x80PK")
    with pytest.raises(FileFormatError):
        load_instance(path)


def test_missing_file_and_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"nowhere\.json.*check the path"):
        load_instance(tmp_path / "nowhere.json")
    with pytest.raises(FileFormatError, match="check the path"):
        load_instance(tmp_path)
