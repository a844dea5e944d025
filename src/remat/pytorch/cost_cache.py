"""Measured costs on disk, one JSON file for each device, safe for several processes at once.

A reader sees a whole file or none: writers merge under a lock and replace the file in one move. A file that
cannot be read is set aside with a warning: what was measured can be measured again.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FORMAT, VERSION = "remat-costs", 2
CACHE_VARIABLE = "REMAT_CACHE_DIR"


@dataclass(frozen=True, slots=True)
class OpCost:
    time_ns: float
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class CostCache:
    """The measured ops of one device, torch version and thread count."""

    device_key: str
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', self.device_key)}.json"

    def load(self) -> dict[str, OpCost]:
        if not self.path.exists():
            return {}
        try:
            return _parse(self.path.read_text(), self.device_key)
        except (OSError, ValueError, KeyError, TypeError) as error:
            warnings.warn(f"Cost cache {self.path} cannot be read ({error}); its ops are measured again.", stacklevel=2)
            return {}

    def add(self, measured: Mapping[str, OpCost]) -> None:
        """Merge `measured` into the file; ops measured by another process meanwhile are kept."""
        if not measured:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._locked():
            merged = {**self.load(), **measured}
            ops = {key: [cost.time_ns, cost.workspace_bytes] for key, cost in sorted(merged.items())}
            text = json.dumps({"format": FORMAT, "version": VERSION, "device": self.device_key, "ops": ops}, indent=0)
            handle, name = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.replace(name, self.path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self.path.with_suffix(".lock"), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def cache_folder() -> Path:
    """`$REMAT_CACHE_DIR`, or `remat` in the user's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "remat"


def _parse(text: str, device_key: str) -> dict[str, OpCost]:
    document = json.loads(text)
    if (document["format"], document["version"], document["device"]) != (FORMAT, VERSION, device_key):
        raise ValueError("it was written by another version or for another device")
    return {key: OpCost(float(time), int(workspace)) for key, (time, workspace) in document["ops"].items()}
