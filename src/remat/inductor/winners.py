"""Choices that won by measurement, on disk: one JSON file for each step, budget and device."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

from remat.inductor.joint import Joint
from remat.pytorch.cost_cache import cache_folder

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
        path = self._path(joint)
        if not path.exists():
            return None
        try:
            document = json.loads(path.read_text())
            if (document["format"], document["version"]) != (FORMAT, VERSION):
                raise ValueError("another format or version")
            number_of = {node.name: number for number, node in enumerate(joint.nodes)}
            saved = frozenset(number_of[name] for name in document["saved"])
            return Winner(saved, str(document["name"]), bool(document["other_loss"]), bool(document["by_solver"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            warnings.warn(f"{path} cannot be read ({error}); the search is made again.", stacklevel=2)
            return None

    def store(self, joint: Joint, found: Winner) -> None:
        path = self._path(joint)
        path.parent.mkdir(parents=True, exist_ok=True)
        names = sorted(joint.nodes[number].name for number in found.saved)
        document: dict[str, object] = {"format": FORMAT, "version": VERSION, "name": found.name, "saved": names}
        document |= {"other_loss": found.other_loss, "by_solver": found.by_solver}
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            json.dump(document, file, indent=0)
        os.replace(temporary, path)

    def _path(self, joint: Joint) -> Path:
        text = "\n".join(f"{node.name} {node.target} {node.size_bytes} {node.reads}" for node in joint.nodes)
        digest = hashlib.sha256(f"{self.key}\n{text}".encode()).hexdigest()[:32]
        return cache_folder() / "compiled" / f"{digest}.json"
