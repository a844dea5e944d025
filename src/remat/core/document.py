"""Versioned JSON documents: read with every field checked, written whole or not at all.

In: a path and the formats a caller understands. Out: a `Record`, whose readers return typed fields or raise
`FileFormatError` with one sentence. Files are data: nothing here evaluates or unpickles what it reads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeGuard

from remat.core.budget import format_bytes
from remat.core.problem import LARGEST_BYTES
from remat.core.whole_file import replace_file
from remat.errors import FileFormatError

MAX_FILE_BYTES = 64 * 2**20
"""Larger files are not read: what cannot be read and checked within seconds would break every time limit."""
MAX_ITEMS = 1_000_000
"""Longer lists in a document are refused."""


@dataclass(frozen=True, slots=True)
class Record:
    """One JSON object and where it stands, as `plan.json: ops[3]`."""

    fields: Mapping[str, object]
    origin: str
    position: int | None = None
    """In the list at `origin`, where it is one of a list."""

    @property
    def where(self) -> str:
        return self.origin if self.position is None else f"{self.origin}[{self.position}]"

    def text(self, key: str, default: str | None = None) -> str:
        found = self._get(key, default)
        return found if _is_text(found) else self._refuse(key, "a string of whole characters", found)

    def flag(self, key: str, default: bool | None = None) -> bool:
        found = self._get(key, default)
        return found if isinstance(found, bool) else self._refuse(key, "true or false", found)

    def integer(self, key: str, default: int | None = None) -> int:
        found = self._get(key, default)
        return found if _is_count(found) else self._refuse(key, "an integer from 0 to 2**62", found)

    def signed(self, key: str, default: int | None = None) -> int:
        """A whole number on either side of 0."""
        found = self._get(key, default)
        is_whole = isinstance(found, int) and not isinstance(found, bool) and abs(found) <= LARGEST_BYTES
        return found if is_whole and isinstance(found, int) else self._refuse(key, "a whole number", found)

    def number(self, key: str, default: float | None = None) -> float:
        found = self._get(key, default)
        return found if _is_amount(found) else self._refuse(key, "a finite number from 0 to 2**62", found)

    def integers(self, key: str) -> tuple[int, ...]:
        found = self.items(key)
        counts = [item for item in found if _is_count(item)]
        if len(counts) < len(found):
            bad = next(item for item in found if not _is_count(item))
            self._refuse(key, "a list of integers from 0 to 2**62", bad)
        return tuple(counts)

    def numbers(self, key: str) -> tuple[float, ...]:
        found = self.items(key)
        amounts = [float(item) for item in found if _is_amount(item)]
        if len(amounts) < len(found):
            bad = next(item for item in found if not _is_amount(item))
            self._refuse(key, "a list of finite numbers from 0 to 2**62", bad)
        return tuple(amounts)

    def texts(self, key: str) -> tuple[str, ...]:
        found = self.items(key)
        bad = [item for item in found if not _is_text(item)]
        if bad:
            self._refuse(key, "a list of strings of whole characters", bad[0])
        return tuple(item for item in found if _is_text(item))

    def items(self, key: str) -> list[object]:
        found = self._get(key, None)
        if not isinstance(found, list):
            self._refuse(key, "a list", found)
        if len(found) > MAX_ITEMS:
            raise FileFormatError(
                f"{self.where}: `{key}` lists {len(found)} items, and lists of up to {MAX_ITEMS} are read; "
                "state it in fewer parts."
            )
        return found

    def record(self, key: str) -> Record:
        found = self._get(key, None)
        return Record(found, f"{self.where}: {key}") if isinstance(found, dict) else self._refuse(key, "object", found)

    def records(self, key: str) -> tuple[Record, ...]:
        found = self.items(key)
        bad = [item for item in found if not isinstance(item, dict)]
        if bad:
            self._refuse(key, "a list of objects", bad[0])
        place = f"{self.where}: {key}"
        return tuple(Record(item, place, number) for number, item in enumerate(found) if isinstance(item, dict))

    def _get(self, key: str, default: object) -> object:
        return self.fields.get(key, default)

    def _refuse(self, key: str, wanted: str, found: object) -> NoReturn:
        what = "nothing" if found is None else _shorten(found)
        raise FileFormatError(f"{self.where}: `{key}` must be {wanted}, found {what}; correct or regenerate the file.")


def read_document(path: Path, versions: Mapping[str, int]) -> Record:
    """The object in `path`, whose `format` must be a key of `versions` and whose `version` at most its value.

    What a later version adds can be left out, so that files of earlier ones stay readable.
    """
    try:
        fields: object = json.loads(read_text(path), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(
            f"{path} is not complete JSON ({_shorten(str(error))}); it may be cut short or another kind of file: "
            "write it again."
        ) from error
    wanted = " or ".join(f'"{name}"' for name in versions)
    if not isinstance(fields, dict):
        raise FileFormatError(f"{path} holds no JSON object; a file of format {wanted} is needed.")
    record = Record(fields, str(path))
    name = record.text("format", "")
    if name not in versions:
        raise FileFormatError(f"{path} has format {_shorten(name)}; a file of format {wanted} is needed.")
    version = record.integer("version")
    if not 1 <= version <= versions[name]:
        newest = versions[name]
        readable = f"version {newest}" if newest == 1 else f"versions 1 to {newest}"
        raise FileFormatError(f"{path} has version {version} of {name}; this Remat reads {readable}: write it again.")
    return record


def read_text(path: Path) -> str:
    """What is in `path`; what is too large is refused before it is read. Raises `ValueError` where it is no text."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            # A pipe has no size, so that it is read as far as it may go.
            content = file.read(MAX_FILE_BYTES + 1) if size <= MAX_FILE_BYTES else b""
    except OSError as error:
        raise FileFormatError(f"Cannot read {path}: {error.strerror}; check the path.") from error
    if max(size, len(content)) > MAX_FILE_BYTES:
        found = format_bytes(size) if size > MAX_FILE_BYTES else "more"
        raise FileFormatError(
            f"{path} is too large: it has {found}, and files of up to {format_bytes(MAX_FILE_BYTES)} are read; "
            "state it in fewer parts."
        )
    return content.decode("utf-8")


def write_document(path: Path, fields: Mapping[str, object]) -> None:
    """Write `fields` beside `path` and rename, so that a reader sees the old file or the new one, never a part."""
    write_text(path, json.dumps(fields, allow_nan=False, separators=(",", ":")))


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write beside `path` and rename."""
    try:
        replace_file(path, content)
    except OSError as error:
        raise FileFormatError(f"Cannot write {path}: {error.strerror}; check the folder and its rights.") from error


def _is_text(found: object) -> TypeGuard[str]:
    # JSON can hold halves of a character, which nothing can print.
    if not isinstance(found, str):
        return False
    return found.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in found)


def _is_count(found: object) -> TypeGuard[int]:
    # JSON gives no other kind of integer; True is one of another type.
    return type(found) is int and 0 <= found <= LARGEST_BYTES


def _is_amount(found: object) -> TypeGuard[float]:
    # The comparison is false for NaN and infinity, and safe for integers too long for a float.
    return (type(found) is int or type(found) is float) and 0 <= found <= LARGEST_BYTES


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _shorten(found: object) -> str:
    text = repr(found)
    return text if len(text) <= 60 else f"{text[:57]}..."
