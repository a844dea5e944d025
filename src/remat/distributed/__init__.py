"""Many devices: one plan on every rank, made for what each rank holds."""

from __future__ import annotations

from typing import Any

__all__ = ["assume_link", "balance", "choose_reshard", "measure_link", "plan_pipeline", "shard"]

_MODULES = {
    "assume_link": "remat.distributed.sharded",
    "balance": "remat.distributed.pipelines.balance",
    "choose_reshard": "remat.distributed.reshard",
    "measure_link": "remat.distributed.sharded",
    "plan_pipeline": "remat.distributed.pipelines.planned",
    "shard": "remat.distributed.sharded",
}


def __getattr__(name: str) -> Any:
    """Found when it is asked for: what ranks agree on is needed before there is a pipeline."""
    import importlib

    if name not in _MODULES:
        raise AttributeError(f"module 'remat.distributed' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
