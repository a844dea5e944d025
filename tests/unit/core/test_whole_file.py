"""Files that appear whole or not at all, and what killed writers leave behind."""

from __future__ import annotations

import errno
import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from remat.core.whole_file import replace_file


def test_content_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    replace_file(path, b"old")
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    (tmp_path / ".plan.json.0123abcd.tmp").write_text("half of")
    (tmp_path / ".other.json.0123abcd.tmp").write_text("of another file")
    replace_file(path, b"whole")
    assert sorted(os.listdir(tmp_path)) == [".other.json.0123abcd.tmp", "plan.json"]


def test_what_another_writer_is_still_writing_stays(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    other = tmp_path / ".plan.json.0123abcd.tmp"
    with other.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        replace_file(path, b"whole")
        assert other.exists()
    replace_file(path, b"whole")
    assert not other.exists()


def test_failure_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    replace_file(path, b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_threads_that_write_one_file_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    contents = [bytes([number]) * 100_000 for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda content: replace_file(path, content), contents))
    assert path.read_bytes() in contents
    assert os.listdir(tmp_path) == ["plan.json"]


def test_mask_of_the_user_is_kept_and_decides_who_may_read(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "plan.json", b"")
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o640


def test_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        replace_file(pipe, b"content")
        assert os.read(reader, 100) == b"content"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
