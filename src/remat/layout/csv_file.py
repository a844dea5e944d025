"""MiniMalloc's CSV files: problems in, problems with offsets out.

One buffer a line under the header `id,lower,upper,size`, in any order; `alignment` is optional, `offset` is what a
placement adds. The older names are read too: `buffer` or `buffer_id`, `start` or `begin`, and `end`, which is the last
time of a life and not the one after it. Every refusal names the line.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from remat.core.document import read_text, write_text
from remat.errors import FileFormatError, InfeasibleLayout, InvalidLayout
from remat.layout.problem import Buffer, LayoutProblem, Placement

_NAMES = {"buffer": "id", "buffer_id": "id", "start": "lower", "begin": "lower", "end": "upper"}
_REQUIRED = ("id", "lower", "upper", "size")
_KNOWN = (*_REQUIRED, "alignment", "offset", "hint", "gaps")
_LONGEST_NUMBER = 20
MAX_BUFFERS = 200_000
"""Larger files are refused: placing their buffers in any way takes longer than a time limit can be kept."""


@dataclass(frozen=True, slots=True)
class _Header:
    columns: tuple[str, ...]
    last_time_included: bool
    """Whether lives are given with their last time, as in the older files."""
    places: tuple[int, ...]
    """Where the required columns stand."""
    alignment: int | None
    gaps: int | None


def load_csv(path: Path, capacity: int | None = None) -> LayoutProblem:
    """Read a problem; a file that cannot be one is refused with the line and what is wrong there."""
    lines = _read(path)
    if not lines:
        raise FileFormatError(f"{path} is empty; its first line must be {','.join(_REQUIRED)}.")
    header = _header(path, *lines[0])
    if len(lines) - 1 > MAX_BUFFERS:
        raise FileFormatError(
            f"{path} has {len(lines) - 1} buffers, and files of up to {MAX_BUFFERS} are read; state it in fewer parts."
        )
    buffers: list[Buffer] = []
    lines_of: dict[str, int] = {}
    for line, fields in lines[1:]:
        buffer = _buffer(path, line, header, fields)
        if buffer.id in lines_of:
            raise _refused(
                path, line, f"the id {buffer.id} is also that of line {lines_of[buffer.id]}; ids must differ"
            )
        if capacity is not None and buffer.size > capacity:
            what = f"buffer {buffer.id} of size {buffer.size} is larger than the capacity {capacity}"
            raise InfeasibleLayout(f"{path}, line {line}: {what}; raise the capacity.", buffer.size)
        lines_of[buffer.id] = line
        buffers.append(buffer)
    return LayoutProblem(tuple(buffers), capacity)


def save_csv(problem: LayoutProblem, placement: Placement, path: Path) -> None:
    """Write the problem with the offsets of `placement`; the file appears whole or not at all."""
    has_alignment = any(buffer.alignment > 1 for buffer in problem.buffers)
    columns = [*_REQUIRED, *(["alignment"] if has_alignment else []), "offset"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for buffer, offset in zip(problem.buffers, placement.offsets, strict=True):
        alignment = [buffer.alignment] if has_alignment else []
        writer.writerow([buffer.id, buffer.lower, buffer.upper, buffer.size, *alignment, offset])
    write_text(path, text.getvalue())


def _read(path: Path) -> list[tuple[int, list[str]]]:
    """The lines that are not blank, each with its number."""
    try:
        text = read_text(path).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path} is not a text file: {error.reason} at byte {error.start}.") from error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        return [(reader.line_num, [field.strip() for field in row]) for row in reader if any(row)]
    except csv.Error as error:
        raise _refused(path, reader.line_num, f"{error}; write plain fields between commas") from error


def _header(path: Path, line: int, fields: list[str]) -> _Header:
    columns = tuple(_NAMES.get(field, field) for field in fields)
    for column in columns:
        if columns.count(column) > 1:
            raise _refused(path, line, f"the column {column} is there twice")
        if column not in _KNOWN:
            raise _refused(path, line, f"no column is called {column!r}; the columns are {', '.join(_KNOWN)}")
    for column in _REQUIRED:
        if column not in columns:
            raise _refused(path, line, f"the column {column} is missing; the header must name {','.join(_REQUIRED)}")
    place = {column: number for number, column in enumerate(columns)}
    required = tuple(place[column] for column in _REQUIRED)
    return _Header(columns, "end" in fields, required, place.get("alignment"), place.get("gaps"))


def _buffer(path: Path, line: int, header: _Header, fields: list[str]) -> Buffer:
    if len(fields) != len(header.columns):
        raise _refused(path, line, f"there are {len(fields)} fields, and the header names {len(header.columns)}")
    if header.gaps is not None and fields[header.gaps]:
        raise _refused(path, line, "lives with gaps cannot be placed; give each part a buffer of its own")
    name, lower, upper, size = (fields[place] for place in header.places)
    if not name:
        raise _refused(path, line, "the id is missing")
    begin, end, amount = _integers(path, line, lower, upper, size)
    alignment = fields[header.alignment] if header.alignment is not None else ""
    step = _integer(path, line, "alignment", alignment) if alignment else 1
    try:
        return Buffer(name, begin, end + header.last_time_included, amount, step)
    except InvalidLayout as error:
        raise FileFormatError(f"{path}, line {line}: {error}") from error


def _integers(path: Path, line: int, lower: str, upper: str, size: str) -> tuple[int, int, int]:
    digits = lower + upper + size
    # Almost every line is like this, and there may be many of them.
    if lower and upper and size and digits.isdigit() and digits.isascii() and len(digits) <= _LONGEST_NUMBER:
        return int(lower), int(upper), int(size)
    begin, end = _integer(path, line, "lower", lower), _integer(path, line, "upper", upper)
    return begin, end, _integer(path, line, "size", size)


def _integer(path: Path, line: int, column: str, text: str) -> int:
    digits = text if text.isdigit() else text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > _LONGEST_NUMBER:
        raise _refused(path, line, f"{column} is {text[:40]!r}; it must be a whole number")
    return int(text)


def _refused(path: Path, line: int, what: str) -> FileFormatError:
    return FileFormatError(f"{path}, line {line}: {what}.")
