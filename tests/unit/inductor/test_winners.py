"""Choices that won by measurement, on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings
from tests.support.joints import joints

from remat.inductor.model.joint import Half, Joint, JointNode, Kind
from remat.inductor.winners import Winner, Winners


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    return tmp_path / "compiled"


def small_joint() -> Joint:
    nodes = tuple(
        JointNode(f"node_{number}", "test", Kind.FUSED, Half.FORWARD, (), number, 4, 1, True) for number in range(2)
    )
    return Joint(nodes, frozenset([1]), frozenset())


@given(joints())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_won_is_found_for_the_same_graph_and_key_only(joint: Joint) -> None:
    winners = Winners("H200 12 GiB")
    winners.store(joint, Winner(frozenset([1, 2]), "solver"))
    assert winners.load(joint) == Winner(frozenset([1, 2]), "solver")
    assert Winners("H200 10 GiB").load(joint) is None
    larger = replace(joint.nodes[1], size_bytes=joint.nodes[1].size_bytes + 1)
    assert winners.load(replace(joint, nodes=(joint.nodes[0], larger, *joint.nodes[2:]))) is None


HEAD = '{"format": "remat-compiled-choice", "version": 2, "name": "x"'


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[]", "[" * 100_000, "\0\1\2", f'{HEAD}, "saved": []}}'),
        '{"format": "remat-compiled-choice", "version": 1, "name": "x", "saved": [7]}',
        f'{HEAD}, "saved": [[]], "other_loss": false, "by_solver": false}}',
        f'{HEAD}, "saved": ["nowhere"], "other_loss": false, "by_solver": false}}',
        f'{HEAD}, "saved": [], "other_loss": 1, "by_solver": "no"}}',
    ],
)
def test_a_damaged_file_is_told_and_the_search_made_again(cache: Path, text: str) -> None:
    joint = small_joint()
    winners = Winners("H200 12 GiB")
    winners.store(joint, Winner(frozenset(), "solver"))
    (path,) = cache.glob("*.json")
    path.write_text(text)
    with pytest.warns(UserWarning, match="the search is made again"):
        assert winners.load(joint) is None
    winners.store(joint, Winner(frozenset([1]), "torch's cut"))
    assert winners.load(joint) == Winner(frozenset([1]), "torch's cut")


def test_folder_that_takes_nothing_is_told_once(cache: Path) -> None:
    cache.write_text("a file in place of the folder")
    joint, winners = small_joint(), Winners("H200 12 GiB")
    with pytest.warns(UserWarning, match="cannot be") as told:
        for _ in range(2):
            winners.store(joint, Winner(frozenset([1]), "solver"))
            assert winners.load(joint) is None
    assert len(told) == 1
