"""What all tables share: reading results, saying where they come from, and cells."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.runs import read_runs

RESULTS = Path(__file__).parents[1] / "results"
MIB, GIB = 2**20, 2**30
MISSING = "not recorded"
RECORDED: Mapping[str, tuple[str, ...]] = {
    "date": ("date", "measured_on"),
    "machine": ("machine", "place", "device"),
    "torch": ("torch", "torch_version"),
    "command": ("command",),
}
"""What a reader wants to know of a run, and the fields in which a results file may say it."""


def read_text(name: str) -> str:
    return (RESULTS / name).read_text(encoding="utf-8")


def read(name: str) -> Any:
    return json.loads(read_text(name))


def origin(name: str) -> str:
    """One line on where a file's figures come from."""
    found = read(name)
    fields = {**(found if isinstance(found, dict) else {}), **read_runs(RESULTS).get(name, {})}
    said = []
    for title, keys in RECORDED.items():
        told = next((str(fields[key]) for key in keys if fields.get(key)), MISSING)
        said.append(f"{title}: {f'`{told}`' if title == 'command' and told != MISSING else told}")
    return f"`{name}` · {' · '.join(said)}"


def table(header: str, rows: Iterable[Sequence[str]]) -> str:
    """`header` has a name for each column; one that ends in ":" is a column of numbers."""
    names = [name.strip() for name in header.split("|")]
    lines = [
        f"| {' | '.join(name.removesuffix(':') for name in names)} |",
        f"|{'|'.join('---:' if name.endswith(':') else '---' for name in names)}|",
    ]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def stated(name: str, body: str) -> str:
    return f"{origin(name)}\n\n{body}"


def mib(size: float | None) -> str:
    return "" if size is None else f"{size / MIB:.1f}"


def gib(size: float | None) -> str:
    return "" if size is None else f"{size / GIB:.2f}"


def percent(share: float | None, digits: int = 1) -> str:
    return "" if share is None else f"{100 * share:.{digits}f} %"


def plain_label(label: str) -> str:
    """All rows of a model are helped past masks in the same way, so its label need not say so."""
    return label.removesuffix(", eager masks").removesuffix(", one graph")
