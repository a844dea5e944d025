"""Files that are there whole or not at all, whatever happens to the process that writes them.

In: a path and bytes. Out: the file, by way of one beside it that is renamed. A writer holds a lock on its own temporary
file, so that what a killed one left behind can be told from what a living one is still writing, and goes with the next
write.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ENDING = ".tmp"


def replace_file(path: Path, content: bytes) -> None:
    """Write beside `path` and rename; raises `OSError`, and leaves nothing beside it then."""
    if path.exists() and not path.is_file():
        # A device or a pipe is written to: renaming onto /dev/null would put a file in its place.
        path.write_bytes(content)
        return
    _remove_leftovers(path)
    with _temporary(path) as (temporary, handle):
        with os.fdopen(os.dup(handle), "wb") as file:
            file.write(content)
        os.fsync(handle)
        os.replace(temporary, path)


@contextmanager
def _temporary(path: Path) -> Iterator[tuple[Path, int]]:
    """A new file beside `path`, locked by this process; gone in the end unless it was renamed."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{ENDING}")
        # The user's mask decides who may read it, as for anything else the user writes.
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        _lock(handle)
        if os.fstat(handle).st_nlink:
            break
        # Another writer took it for a leftover between its making and its locking.
        os.close(handle)
    try:
        yield temporary, handle
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(handle)


def _remove_leftovers(path: Path) -> None:
    """Remove what killed processes left of earlier attempts to write `path`."""
    for name in os.listdir(path.parent):
        if not (name.startswith(f".{path.name}.") and name.endswith(ENDING)):
            continue
        # Gone meanwhile, of another user, or locked by a process that is still writing: not ours to remove.
        with suppress(OSError):
            _remove_abandoned(path.with_name(name))


def _remove_abandoned(leftover: Path) -> None:
    handle = os.open(leftover, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(leftover)
    finally:
        os.close(handle)


def _lock(handle: int) -> None:
    # Where a file system knows no locks, nobody can take the file for a leftover either.
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX)
