"""A file without a name: what was written to it is gone with the process, however that ends.

In: a folder. Out: offsets to write to and read from, past the system's cache where the file system can do that. All
that can go wrong is `OffloadFailed`, in one sentence. Memory and offsets are in whole pages, as direct access asks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from remat.core.budget import format_bytes
from remat.errors import OffloadFailed

_Call = Callable[[int, Sequence[Any], int], int]
"""`os.preadv` or `os.pwritev`."""
_FLAGS = os.O_RDWR | os.O_CLOEXEC
_DIRECT = getattr(os, "O_DIRECT", 0)
_CANNOT = {errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.ENOSYS}
"""How file systems say that they do not know a way to open a file, or to reserve room in it."""


class UnnamedFile:
    """Room on the disk of a folder, which grows when asked and stays until nobody holds the object."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.size_bytes = folder, 0
        try:
            self._handle = _open(folder)
        except OSError as error:
            raise OffloadFailed(
                f"No file can be made in {folder} for what was to be offloaded ({error.strerror}); name a folder on a "
                "local disk that can be written to."
            ) from error
        self._close = weakref.finalize(self, os.close, self._handle)

    @property
    def is_direct(self) -> bool:
        """Whether reads and writes pass the system's cache by."""
        return bool(_DIRECT and fcntl.fcntl(self._handle, fcntl.F_GETFL) & _DIRECT)

    def grow(self, size_bytes: int) -> int:
        """Reserve so much more; gives where it begins."""
        begin = self.size_bytes
        try:
            _reserve(self._handle, begin, size_bytes)
        except OSError as error:
            raise OffloadFailed(
                f"The disk of {self.folder} has no {format_bytes(size_bytes)} more for what was to be offloaded "
                f"({error.strerror}); free some of it, or offload less."
            ) from error
        self.size_bytes = begin + size_bytes
        return begin

    def write(self, content: memoryview, offset: int) -> None:
        self._transfer("written", os.pwritev, content, offset)

    def read(self, content: memoryview, offset: int) -> None:
        self._transfer("read", os.preadv, content, offset)

    def close(self) -> None:
        self._close()

    def _transfer(self, what: str, call: _Call, content: memoryview, offset: int) -> None:
        done = 0
        while done < len(content):
            try:
                moved = self._attempt(call, content[done:], offset + done)
            except OSError as error:
                raise OffloadFailed(_failed(self.folder, what, error.strerror)) from error
            if not moved:
                raise OffloadFailed(_failed(self.folder, what, "its end came too soon"))
            done += moved

    def _attempt(self, call: _Call, content: memoryview, offset: int) -> int:
        try:
            return call(self._handle, [content], offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.is_direct:
                raise
        # Some file systems open a file for direct access and refuse it afterwards, or ask for larger sectors.
        fcntl.fcntl(self._handle, fcntl.F_SETFL, fcntl.fcntl(self._handle, fcntl.F_GETFL) & ~_DIRECT)
        return call(self._handle, [content], offset)


def _failed(folder: Path, what: str, reason: str | None) -> str:
    return (
        f"What was offloaded to {folder} cannot be {what} ({reason}); look after that disk, or offload to host memory."
    )


def _open(folder: Path) -> int:
    """For direct access if that can be had, without ever having had a name if that can be had."""
    for flags in dict.fromkeys((_FLAGS | _DIRECT, _FLAGS)):
        for make in (_open_unnamed, _open_and_unlink):
            try:
                return make(folder, flags)
            except OSError as error:
                refusal = error
                if error.errno not in _CANNOT or not folder.is_dir():
                    raise
    raise refusal


def _open_unnamed(folder: Path, flags: int) -> int:
    if not hasattr(os, "O_TMPFILE"):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    return os.open(folder, flags | os.O_TMPFILE, 0o600)


def _open_and_unlink(folder: Path, flags: int) -> int:
    path = folder / f".remat-{secrets.token_hex(8)}"
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    finally:
        # A file system may make the file and refuse to open it this way.
        with suppress(FileNotFoundError):
            os.unlink(path)


def _reserve(handle: int, begin: int, size_bytes: int) -> None:
    """Room that is there when it is written to; where nobody can promise that, a file of the right length."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, begin, size_bytes)
            return
    except OSError as error:
        if error.errno not in _CANNOT:
            # What was reserved before the disk was full is given back.
            os.ftruncate(handle, begin)
            raise
    os.ftruncate(handle, begin + size_bytes)
