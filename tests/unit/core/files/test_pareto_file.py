"""Pareto curves on disk: the same after a round trip, refused where they contradict themselves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from remat.core.files.pareto_file import encode_pareto
from remat.core.results.pareto import Pareto, ParetoPoint
from remat.errors import FileFormatError

CURVE = Pareto(
    name="gpt",
    device="cpu",
    plain_peak_bytes=1000,
    base_time_ns=50.0,
    floor_bytes=300,
    points=(
        ParetoPoint("auto", 1000, 990, 50.0, 50.0, measured_peak_bytes=990, measured_ratio=1.01),
        ParetoPoint("auto", 500, 480, 60.0, 55.0),
    ),
    baselines=(ParetoPoint("full", 400, 400, 80.0, 55.0),),
)


def write(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "curve.json"
    path.write_text(json.dumps({**encode_pareto(CURVE), **changes}))
    return path


def point(**changes: Any) -> dict[str, Any]:
    found = encode_pareto(CURVE)["points"]
    assert isinstance(found, tuple)
    return {**found[0], **changes}


def test_round_trip(tmp_path: Path) -> None:
    CURVE.save(tmp_path / "curve.json")
    assert Pareto.load(tmp_path / "curve.json") == CURVE


def test_overhead_and_gap() -> None:
    assert CURVE.overhead(60.0) == pytest.approx(0.2)
    assert CURVE.points[1].gap == pytest.approx(1 - 55 / 60)
    assert replace(CURVE, base_time_ns=0.0).overhead(5.0) == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 9}, "has version 9"),
        ({"format": "remat-plan"}, "has format"),
        ({"floor_bytes": -1}, "`floor_bytes` must be"),
        ({"points": [point(peak_bytes=1001)]}, "over the budget"),
        ({"points": [point(bound_ns=51.0)]}, "bound is above the time"),
        ({"points": [point(), point()]}, "do not fall"),
        ({"points": [point(), point(budget_bytes=995, time_ns=40.0, bound_ns=1.0)]}, "faster than the one"),
        ({"points": [point(measured_ratio="fast")]}, "`measured_ratio` must be"),
        ({"baselines": 3}, "`baselines` must be a list"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        Pareto.load(write(tmp_path, **changes))
