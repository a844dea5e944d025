"""A disk that fails: one error, nothing lost that was in memory, nothing left in the folder."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from remat.errors import OffloadFailed
from remat.pytorch.host import disk_store
from remat.pytorch.host.disk_store import DiskStore
from remat.pytorch.host.unnamed_file import UnnamedFile

CPU = torch.device("cpu")


def failing(number: int) -> Callable[..., NoReturn]:
    def call(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return call


def test_file_never_has_a_name_while_it_is_used(tmp_path: Path) -> None:
    store = DiskStore(CPU, tmp_path)
    ticket = store.copy_out(torch.ones(1000))
    store.copy_back(ticket)
    ticket.wait_back()
    assert store.total_bytes >= 4000 and list(tmp_path.iterdir()) == []


def test_file_system_without_unnamed_files_or_direct_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def plain_only(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE or flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", plain_only)
    store = DiskStore(CPU, tmp_path)
    ticket = store.copy_out(torch.arange(5000))
    found = store.copy_back(ticket)
    ticket.wait_back()
    assert torch.equal(found, torch.arange(5000)) and list(tmp_path.iterdir()) == []


def test_direct_access_that_is_refused_later_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, written = UnnamedFile(tmp_path), os.pwritev
    file.grow(4096)
    states = iter([True, False])
    monkeypatch.setattr(UnnamedFile, "is_direct", property(lambda _: next(states)))
    calls = iter([failing(errno.EINVAL), written])
    monkeypatch.setattr(os, "pwritev", lambda *args: next(calls)(*args))
    file.write(memoryview(bytes(range(256)) * 16), 0)
    found = bytearray(4096)
    assert os.preadv(file._handle, [found], 0) == 4096 and bytes(found) == bytes(range(256)) * 16
    assert not fcntl.fcntl(file._handle, fcntl.F_GETFL) & os.O_DIRECT


@pytest.mark.parametrize(
    ("make", "reason"),
    [(lambda path: path / "none", "No such file"), (lambda path: path / "file", "Not a directory")],
    ids=["missing", "a file"],
)
def test_folder_that_cannot_be_used_is_told_at_once(tmp_path: Path, make: Callable[[Path], Path], reason: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OffloadFailed, match=f"No file can be made in .*{reason}.*name a folder on a local disk"):
        DiskStore(CPU, make(tmp_path))


def test_read_only_folder_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", failing(errno.EROFS))
    with pytest.raises(OffloadFailed, match=r"No file can be made in .* \(Read-only file system\)"):
        DiskStore(CPU, tmp_path)


def test_full_disk_is_told_before_anything_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "EXTENT_BYTES", 8192)
    store, first = DiskStore(CPU, tmp_path), torch.randn(2000)
    kept = store.copy_out(first)
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
    with pytest.raises(OffloadFailed, match="has no .* more .*No space left on device.*free some of it"):
        store.copy_out(torch.ones(10_000))
    found = store.copy_back(kept)
    kept.wait_back()
    assert torch.equal(found, first)


def test_nearly_full_disk_gives_what_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = os.posix_fallocate

    def small_only(handle: int, begin: int, size: int) -> None:
        (reserve if size <= 2**20 else failing(errno.ENOSPC))(handle, begin, size)

    monkeypatch.setattr(os, "posix_fallocate", small_only)
    store = DiskStore(CPU, tmp_path)
    store.release(store.copy_out(torch.ones(1000)))
    assert store.total_bytes == 4096


def test_file_system_that_reserves_nothing_still_takes_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP))
    store, tensor = DiskStore(CPU, tmp_path), torch.randn(3000)
    ticket = store.copy_out(tensor)
    found = store.copy_back(ticket)
    ticket.wait_back()
    assert torch.equal(found, tensor)


def test_what_cannot_be_written_stays_in_memory_and_the_next_copy_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, tensor = DiskStore(CPU, tmp_path), torch.randn(3000)
    monkeypatch.setattr(os, "pwritev", failing(errno.EIO))
    ticket = store.copy_out(tensor)
    found = store.copy_back(ticket)
    ticket.wait_back()
    assert torch.equal(found, tensor)
    with pytest.raises(OffloadFailed, match=r"cannot be written \(Input/output error\)"):
        store.copy_out(tensor)


def test_file_taken_away_is_told_when_it_is_read(tmp_path: Path) -> None:
    store = DiskStore(CPU, tmp_path)
    ticket = store.copy_out(torch.randn(3000))
    ticket.pieces[0].written.result()  # type: ignore[union-attr]
    os.ftruncate(store._file._handle, 0)
    store.copy_back(ticket)
    with pytest.raises(OffloadFailed, match=r"cannot be read \(its end came too soon\)"):
        ticket.wait_back()
    store.release(ticket)
    assert store.used_bytes == 0


def test_what_is_written_over_stays_the_newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, write, delays = DiskStore(CPU, tmp_path), UnnamedFile.write, iter([0.1])

    def first_is_slow(file: UnnamedFile, content: memoryview, offset: int) -> None:
        time.sleep(next(delays, 0.0))
        write(file, content, offset)

    monkeypatch.setattr(UnnamedFile, "write", first_is_slow)
    ticket = store.copy_out(torch.zeros(1000))
    store.copy_over(ticket, torch.ones(1000))
    store._writers.shutdown()
    assert torch.equal(store.peek(ticket), torch.ones(1000))


def test_nothing_is_left_after_a_kill(tmp_path: Path) -> None:
    code = f"""
import torch
from pathlib import Path
from remat.pytorch.host.disk_store import DiskStore
store = DiskStore(torch.device("cpu"), Path({str(tmp_path)!r}))
tickets = []
for _ in range(8):
    tickets.append(store.copy_out(torch.ones(2**20)))
print("writing", flush=True)
while True:
    store.copy_back(tickets[0])
    tickets[0].wait_back()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]
    assert list(tmp_path.iterdir()) == []


def test_dropped_store_gives_its_room_back(tmp_path: Path) -> None:
    file = UnnamedFile(tmp_path)
    handle = file._handle
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)
    assert UnnamedFile(tmp_path).size_bytes == 0
