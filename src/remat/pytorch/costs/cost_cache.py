"""Measured costs on disk, one JSON file for each device, safe for several processes and threads at once.

A cache is a convenience (`core/files/cache_file.py`): what is wrong with its file is told once, and ops are measured
again. No cost that is not a finite number from 0 on comes out of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from remat.core.cache_file import CacheFile
from remat.core.document import Record
from remat.errors import FileFormatError

FORMAT, VERSION = "remat-costs", 5


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
        return self._file().read(self._decode) or {}

    def add(self, measured: Mapping[str, OpCost]) -> None:
        """Merge `measured` into the file; ops measured by another process meanwhile are kept."""
        if measured:
            self._file().update(lambda: self._encode({**self.load(), **measured}))

    def _file(self) -> CacheFile:
        return CacheFile(self.path, FORMAT, VERSION, "its ops are measured again")

    def _encode(self, costs: Mapping[str, OpCost]) -> dict[str, object]:
        ops = {key: [cost.time_ns, cost.workspace_bytes] for key, cost in sorted(costs.items())}
        return {"device": self.device_key, "ops": ops}

    def _decode(self, record: Record) -> dict[str, OpCost]:
        if record.text("device") != self.device_key:
            raise FileFormatError(f"{record.where} was written for another device.")
        ops = record.record("ops")
        return {key: _decode_cost(ops, key) for key in ops.fields}


def _decode_cost(ops: Record, key: str) -> OpCost:
    found = ops.numbers(key)
    if len(found) != 2 or not found[1].is_integer():
        raise FileFormatError(f"{ops.where}: `{key:.60}` must be a time and a whole number of bytes.")
    return OpCost(found[0], int(found[1]))
