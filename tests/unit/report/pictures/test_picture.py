"""Pictures: the file appears in the asked format, no peak is lost, and bad requests are refused clearly."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from remat.errors import MissingExtra, RematError, UnknownName
from remat.report.pictures.picture import choose_scale, draw_memory, prepare_folder, thin


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_picture_is_written_in_the_format_of_its_suffix(tmp_path: Path, suffix: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new folder" / f"memory.{suffix}"
    draw_memory(path, name="gpt", before=[100, 400, 100], after=[100, 190, 180, 100], budget_bytes=200)
    assert path.read_bytes().startswith(magic)


def test_title_states_the_saving(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = draw_memory(tmp_path / "a.svg", name="gpt", before=[10, 400], after=[10, 100], budget_bytes=200)
    assert "gpt trains in 75% less memory" in path.read_text()


def test_empty_timelines_are_drawn_as_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert draw_memory(tmp_path / "a.png", name="none", before=(), after=(), budget_bytes=1).exists()


def test_unknown_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="a picture ends in .png or .svg"):
        draw_memory(tmp_path / "a.jpeg", name="gpt", before=[1], after=[1], budget_bytes=1)


def test_missing_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(MissingExtra, match=r"remat\[report\]"):
        draw_memory(tmp_path / "a.png", name="gpt", before=[1], after=[1], budget_bytes=1)
    assert not (tmp_path / "a.png").exists()


def test_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    with pytest.raises(RematError, match="Cannot make the folder"):
        prepare_folder(tmp_path / "file" / "pictures")


def test_thinning_keeps_every_stretch_s_peak() -> None:
    values = [0] * 1000
    values[333] = 7
    positions, heights = thin(values, points=10)
    assert (len(positions), max(heights), heights.index(7)) == (10, 7, 3)


def test_thinning_leaves_short_sequences_alone() -> None:
    assert thin([3, 1, 2], points=10) == ([0.0, 1.0, 2.0], [3, 1, 2])


@pytest.mark.parametrize(("largest", "unit"), [(3, "B"), (2048, "KiB"), (5 << 20, "MiB"), (1 << 30, "GiB")])
def test_memory_axis_uses_the_largest_fitting_unit(largest: int, unit: str) -> None:
    assert choose_scale(largest).unit == unit
