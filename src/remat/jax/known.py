"""Plans that compiled steps were found to fit, on disk: one JSON file for each step, budget, device and way of solving.

In: a step's graph and what was asked of it. Out: the plan of an earlier process. One compilation says whether it still
fits; nothing is timed, solved or corrected again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from remat.core.budget import Budget
from remat.core.cache_file import CacheFile, cache_folder
from remat.core.document import Record
from remat.core.files.plan_file import decode_plan, encode_plan, graph_hash
from remat.core.results.plan import Plan
from remat.jax.costs.compiled import default_device
from remat.jax.costs.op_costs import value_sizes
from remat.jax.loop import Asked, Outline

FORMAT, VERSION = "remat-jax-plan", 1


@dataclass(frozen=True, slots=True)
class KnownPlan:
    """The file of one step and what is asked of it."""

    name: str

    @staticmethod
    def of(
        outline: Outline, shapes: Sequence[str], budget: Budget, asked: Asked, options: Mapping[str, Any] | None
    ) -> KnownPlan:
        device, contracted = default_device(), outline.contracted
        facts = [
            graph_hash(contracted.graph, value_sizes(contracted)),
            list(outline.captured.wanted),
            list(shapes),
            [budget.amount, budget.unit.value],
            asdict(asked),
            sorted((key, str(value)) for key, value in (options or {}).items()),
            [jax.__version__, device.platform, device.device_kind],
        ]
        return KnownPlan(hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32])

    def read(self) -> Plan | None:
        return self._file().read(self._decode)

    def write(self, plan: Plan) -> None:
        self._file().write({"plan": encode_plan(plan)})

    def _decode(self, record: Record) -> Plan:
        return decode_plan(record.record("plan"), self._path)

    @property
    def _path(self) -> Path:
        return cache_folder() / "jax" / f"{self.name}.json"

    def _file(self) -> CacheFile:
        return CacheFile(self._path, FORMAT, VERSION, "the step is planned again")
