from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from remat.pytorch.cost_cache import CostCache, OpCost, cache_folder

WRITER = """
import sys
from pathlib import Path
from remat.pytorch.cost_cache import CostCache, OpCost
cache = CostCache("device", Path(sys.argv[1]))
for number in range(20):
    cache.add({f"{sys.argv[2]} {number}": OpCost(float(number), number)})
"""


def test_costs_come_back_as_they_were_added(tmp_path: Path) -> None:
    cache = CostCache("cpu 2 threads", tmp_path)
    cache.add({"mm": OpCost(1.5, 10)})
    cache.add({"add": OpCost(0.5, 0)})
    assert cache.load() == {"mm": OpCost(1.5, 10), "add": OpCost(0.5, 0)}


def test_several_processes_lose_nothing(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(name)]) for name in range(4)]
    assert [writer.wait(timeout=600) for writer in writers] == [0, 0, 0, 0]
    assert len(CostCache("device", tmp_path).load()) == 80
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "remat-costs"}', '{"format": "other", "version": 1}'])
def test_damaged_file_is_reported_and_replaced(tmp_path: Path, text: str) -> None:
    cache = CostCache("device", tmp_path)
    cache.path.write_text(text)
    with pytest.warns(UserWarning, match="cannot be read"):
        assert cache.load() == {}
    with pytest.warns(UserWarning, match="cannot be read"):
        cache.add({"mm": OpCost(1.0, 0)})
    assert cache.load() == {"mm": OpCost(1.0, 0)}


def test_devices_have_files_of_their_own(tmp_path: Path) -> None:
    CostCache("one", tmp_path).add({"mm": OpCost(1.0, 0)})
    assert CostCache("two", tmp_path).load() == {}


def test_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("REMAT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "remat"
