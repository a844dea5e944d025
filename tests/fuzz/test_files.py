"""Damaged files of every kind, a few hundred in every run and thousands with `--long`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fuzz.mutations import KINDS, Kind, run


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_whole_file_is_read_without_a_word(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / kind.name
    kind.write(path)
    assert list(kind.read(path)) == []


@pytest.mark.parametrize("first", range(0, 200, 40))
def test_damaged_file_ends_well_or_with_one_line(first: int, tmp_path: Path) -> None:
    assert run(range(first, first + 40), tmp_path).broken == ()


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 5000, 500))
def test_thousands_of_damaged_files_end_well_or_with_one_line(first: int, tmp_path: Path) -> None:
    assert run(range(first, first + 500), tmp_path).broken == ()
