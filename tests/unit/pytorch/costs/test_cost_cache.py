from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from remat.core.cache_file import cache_folder
from remat.pytorch.costs.cost_cache import VERSION, CostCache, OpCost

WRITER = """
import sys
from pathlib import Path
from remat.pytorch.costs.cost_cache import CostCache, OpCost
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
    assert not list(tmp_path.glob(".*"))


DAMAGED = {
    "nothing": b"",
    "cut short": b"{",
    "a list": b"[]",
    "a number": b"7",
    "no fields": b'{"format": "remat-costs"}',
    "another format": b'{"format": "other", "version": 1}',
    "another version": b'{"format": "remat-costs", "version": 1, "device": "device", "ops": {}}',
    "another device": b'{"format": "remat-costs", "version": NOW, "device": "other", "ops": {}}',
    "not UTF-8": b'{"format": "remat-costs", "version": NOW, "device": "\xff\xfe", "ops": {}}',
    "binary": bytes(range(256)),
    "deep nesting": b"[" * 100_000,
    "ops that are a list": b'{"format": "remat-costs", "version": NOW, "device": "device", "ops": []}',
    "ops that are text": b'{"format": "remat-costs", "version": NOW, "device": "device", "ops": "mm"}',
    "format that is a list": b'{"format": [], "version": NOW, "device": "device", "ops": {}}',
} | {
    f"cost {cost}": b'{"format": "remat-costs", "version": NOW, "device": "device", "ops": {"good": [1, 0], "mm": %s}}'
    % cost.encode()
    for cost in (
        *("null", "{}", "7", "[]", "[1]", "[1, 2, 3]", '"12"', "[true, false]", '["1", 2]', "[[1], 2]"),
        *("[NaN, 0]", "[Infinity, 0]", "[1, Infinity]", "[1e999, 0]", "[-1, 0]", "[1, -1]", "[1, 0.5]"),
        f"[{'9' * 400}, 0]",
    )
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_file_is_told_once_and_replaced(tmp_path: Path, name: str) -> None:
    cache = CostCache("device", tmp_path)
    cache.path.write_bytes(DAMAGED[name].replace(b"NOW", str(VERSION).encode()))
    with pytest.warns(UserWarning, match="cannot be read") as told:
        assert cache.load() == {}
        cache.add({"mm": OpCost(1.0, 0)})
    assert len(told) == 1
    assert cache.load() == {"mm": OpCost(1.0, 0)}


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def read_only(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, "Read-only file system")


@pytest.mark.parametrize("function", ["fsync", "replace", "open", "mkdir", "listdir"])
@pytest.mark.parametrize("failure", [no_space, read_only])
def test_disk_that_takes_nothing_is_told_once_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, failure: Callable[..., None]
) -> None:
    cache = CostCache("device", tmp_path / "costs")
    monkeypatch.setattr(os, function, failure)
    with pytest.warns(UserWarning, match="cannot be written") as told:
        for number in range(3):
            cache.add({f"mm {number}": OpCost(1.0, 0)})
    assert len(told) == 1
    monkeypatch.undo()
    assert [path.name for path in tmp_path.rglob("*") if path.suffix not in (".lock", "")] == []
    assert cache.load() == {}
    cache.add({"mm": OpCost(1.0, 0)})
    assert cache.load() == {"mm": OpCost(1.0, 0)}


def in_the_way_of_the_folder(cache: CostCache) -> None:
    cache.folder.write_text("a file")


def in_the_way_of_its_parent(cache: CostCache) -> None:
    cache.folder.rmdir() if cache.folder.exists() else None
    cache.folder.parent.rmdir()
    cache.folder.parent.write_text("a file")


def folder_in_its_place(cache: CostCache) -> None:
    cache.path.mkdir(parents=True)


def pipe_in_its_place(cache: CostCache) -> None:
    cache.folder.mkdir()
    os.mkfifo(cache.path)


def folder_in_place_of_its_lock(cache: CostCache) -> None:
    cache.path.with_suffix(".lock").mkdir(parents=True)


@pytest.mark.parametrize(
    "spoil",
    [
        in_the_way_of_the_folder,
        in_the_way_of_its_parent,
        folder_in_its_place,
        pipe_in_its_place,
        folder_in_place_of_its_lock,
    ],
)
def test_something_else_in_its_place_is_told_once(tmp_path: Path, spoil: Callable[[CostCache], None]) -> None:
    (tmp_path / "parent").mkdir()
    cache = CostCache("device", tmp_path / "parent" / "costs")
    spoil(cache)
    with pytest.warns(UserWarning, match="cannot be") as told:
        for number in range(2):
            assert cache.load() == {}
            cache.add({f"mm {number}": OpCost(1.0, 0)})
    assert len(told) == 1


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_folder_that_nobody_can_write_to_is_told_once() -> None:
    cache = CostCache("device", Path("/proc/self/costs"))
    with pytest.warns(UserWarning, match="cannot be written") as told:
        cache.add({"mm": OpCost(1.0, 0)})
        cache.add({"mm": OpCost(1.0, 0)})
    assert len(told) == 1


def test_lock_that_is_never_given_back_is_not_waited_for_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CostCache("device", tmp_path)
    file = replace(cache._file(), lock_s=0.1)
    with file._locked(), pytest.warns(UserWarning, match="held its lock"):
        file.update(dict)
    cache.add({"mm": OpCost(1.0, 0)})
    assert cache.load() == {"mm": OpCost(1.0, 0)}


@pytest.mark.parametrize("cost", [OpCost(float("nan"), 0), OpCost(float("inf"), 0)])
def test_cost_that_is_no_number_is_not_kept(tmp_path: Path, cost: OpCost) -> None:
    cache = CostCache("device", tmp_path)
    cache.add({"mm": OpCost(1.0, 0)})
    with pytest.warns(UserWarning, match="cannot be written"):
        cache.add({"strange": cost})
    assert cache.load() == {"mm": OpCost(1.0, 0)}
    assert not list(tmp_path.glob(".*"))


def test_devices_have_files_of_their_own(tmp_path: Path) -> None:
    CostCache("one", tmp_path).add({"mm": OpCost(1.0, 0)})
    assert CostCache("two", tmp_path).load() == {}


def test_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("REMAT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "remat"


def test_user_without_a_home_has_a_folder_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("REMAT_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert cache_folder().is_absolute()
