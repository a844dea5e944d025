"""Choices that won by measurement, on disk: one JSON file for each step, budget and device."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from remat.core.cache_file import CacheFile, cache_folder
from remat.core.document import Record
from remat.errors import FileFormatError
from remat.inductor.model.joint import Joint

FORMAT, VERSION = "remat-compiled-choice", 2


@dataclass(frozen=True, slots=True)
class Winner:
    saved: frozenset[int]
    name: str
    """Of the candidate that won."""
    other_loss: bool = False
    """Whether the graph with its loss in chunks, or no longer so, was faster; what it saves is told under that one."""
    by_solver: bool = False
    """Whether the solver's own answer won that makes values again more than once: it is solved for again."""


@dataclass(frozen=True, slots=True)
class Winners:
    """The file of one step; `key` is everything that its choice depends on besides the graph."""

    key: str

    def load(self, joint: Joint) -> Winner | None:
        """What won for this graph, or None where nothing is known of it."""
        return self._file(joint).read(lambda record: _decode(record, joint))

    def store(self, joint: Joint, found: Winner) -> None:
        names = sorted(joint.nodes[number].name for number in found.saved)
        fields: dict[str, object] = {"name": found.name, "saved": names}
        self._file(joint).write({**fields, "other_loss": found.other_loss, "by_solver": found.by_solver})

    def _file(self, joint: Joint) -> CacheFile:
        return CacheFile(self._path(joint), FORMAT, VERSION, "the search is made again")

    def _path(self, joint: Joint) -> Path:
        name = hashlib.sha256(f"{self.key}\n{joint.digest()}".encode()).hexdigest()[:32]
        return cache_folder() / "compiled" / f"{name}.json"


def _decode(record: Record, joint: Joint) -> Winner:
    number_of = {node.name: number for number, node in enumerate(joint.nodes)}
    names = record.texts("saved")
    strange = [name for name in names if name not in number_of]
    if strange:
        raise FileFormatError(f"{record.where}: `saved` names {strange[0]!r:.60}, which the step does not have.")
    saved = frozenset(number_of[name] for name in names)
    return Winner(saved, record.text("name"), record.flag("other_loss"), record.flag("by_solver"))
