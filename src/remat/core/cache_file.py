"""A file that is a convenience: what it holds can be found again, so nothing that is wrong with it stops anything.

In: a path, a format, and fields to keep. Out: the fields as they were kept, or nothing. A file that cannot be read,
written or locked is told in one warning for each process and file, and the caller goes on without it. Writers that add
to what is there take turns by a lock beside the file, so that processes and threads lose nothing of each other's.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from remat.core.document import Record, read_document, write_document
from remat.errors import FileFormatError

Content = TypeVar("Content")

CACHE_VARIABLE = "REMAT_CACHE_DIR"
LOCK_S = 30.0
"""How long to wait for another writer: one that was stopped while it held the lock must not stop everyone."""
_TURN_S = 0.01
_told: set[Path] = set()


@dataclass(frozen=True, slots=True)
class CacheFile:
    """One versioned JSON file of exactly this version; others are as good as damaged."""

    path: Path
    format: str
    version: int
    otherwise: str
    """What happens without the file, as the end of a sentence."""
    lock_s: float = LOCK_S

    def read(self, decode: Callable[[Record], Content]) -> Content | None:
        """What `decode` makes of the file; None where there is none, or none that `decode` accepts."""
        try:
            self._check_place()
            record = read_document(self.path, {self.format: self.version})
            if record.integer("version") != self.version:
                raise FileFormatError(f"{self.path} was written by another version of Remat.")
            return decode(record)
        except (FileFormatError, OSError) as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                self._tell("read", error)
            return None

    def write(self, fields: Mapping[str, object]) -> None:
        """Put `fields` in the place of what is there."""
        self._attempt(lambda: self._replace(fields))

    def update(self, fields: Callable[[], Mapping[str, object]]) -> None:
        """Put `fields()` in the place of what is there, where no other `update` comes between reading and writing."""

        def replace() -> None:
            with self._locked():
                self._replace(fields())

        self._attempt(replace)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            action()
        # JSON has no word for some values, and says so with a ValueError.
        except (FileFormatError, OSError, ValueError) as error:
            self._tell("written", error)

    def _replace(self, fields: Mapping[str, object]) -> None:
        self._check_place()
        write_document(self.path, {"format": self.format, "version": self.version, **fields})

    def _check_place(self) -> None:
        # Of pipes and devices a read may never end.
        if self.path.exists() and not self.path.is_file():
            raise FileFormatError(f"{self.path} is not a file; remove what is in its place.")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        until = time.monotonic() + self.lock_s
        handle = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        try:
            while not take_lock(handle):
                if time.monotonic() > until:
                    raise FileFormatError(f"another process has held its lock for {self.lock_s:g} s")
                time.sleep(_TURN_S)
            yield
        finally:
            os.close(handle)

    def _tell(self, what: str, error: Exception) -> None:
        if self.path in _told:
            return
        _told.add(self.path)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        warnings.warn(f"The cache {self.path} cannot be {what} ({reason}); {self.otherwise}.", stacklevel=4)


def cache_folder() -> Path:
    """`$REMAT_CACHE_DIR`, or `remat` in the user's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "remat"
    except RuntimeError:
        # A user without a home, as in some containers.
        return Path(tempfile.gettempdir()) / f"remat-{os.getuid()}"


def take_lock(handle: int) -> bool:
    """Whether the open file is this process's own from now on, until it is closed."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
