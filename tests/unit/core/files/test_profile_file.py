"""Profiles as files: the same after a round trip, small, and refused where anything does not fit together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.core.profiles import step_profile

import remat
from remat.core.results.profile import BEFORE, StepProfile


def test_profile_is_the_same_after_a_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    step_profile().save(path)
    assert StepProfile.load(path) == step_profile()


def test_profile_that_was_stopped_before_its_first_op_is_the_same_too(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    empty = StepProfile("net", "cpu", "2.13", (), (), 0, 0.0, stopped_by="It raised.")
    empty.save(path)
    assert StepProfile.load(path) == empty
    assert empty.peak_op == BEFORE


def test_five_thousand_ops_take_less_than_a_megabyte(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    long = step_profile(length=1250)
    assert len(long.ops) == 5000
    long.save(path)
    assert path.stat().st_size < 1_000_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fields: fields.update(version=2), "has version 2 of remat-profile"),
        (lambda fields: fields.update(format="remat-plan"), "a file of format"),
        (lambda fields: fields.update(seconds=-1), "`seconds` must be a finite number"),
        (lambda fields: fields["texts"].clear(), "names a text that is not there"),
        (lambda fields: fields["ops"]["time_ns"].pop(), "columns of different lengths"),
        (lambda fields: fields["ops"].pop("live_bytes"), "`live_bytes` must be a list, found nothing"),
        (lambda fields: fields["ops"]["phase"].__setitem__(0, 0), "it must be one of forward"),
        (lambda fields: fields["storages"]["freed"].__setitem__(0, 99), "names an op that is not there"),
        (lambda fields: fields["storages"]["created"].__setitem__(0, -1), "a list of integers from 0"),
        (lambda fields: fields["storages"]["size_bytes"].__setitem__(0, 1), "its storages make"),
    ],
)
def test_damaged_file_is_refused_in_one_sentence(tmp_path: Path, change: object, message: str) -> None:
    path = tmp_path / "profile.json"
    step_profile().save(path)
    fields = json.loads(path.read_text())
    change(fields)  # type: ignore[operator]
    path.write_text(json.dumps(fields))
    with pytest.raises(remat.FileFormatError, match=message):
        StepProfile.load(path)
