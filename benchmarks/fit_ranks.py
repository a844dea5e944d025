"""Ranks over gloo on this machine's CPU: the real peak of a step under many combinations of levers.

One process for each rank; each combination runs in a fresh model, two steps to settle and one that is measured. Out:
the fullest rank's bytes, one number for each combination.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

import remat
from remat import zoo
from remat.fit.apply import make_optimizer_of, set_up
from remat.fit.levers import Levers

MEASURED = 3
"""Steps, of which the leanest counts: gloo's threads let go of their buffers a little later than others need them."""


def measured_peaks(name: str, sizes: dict[str, Any], combinations: Sequence[Levers], ranks: int) -> list[int]:
    """The peak of the fullest rank under each combination."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (ranks, folder, name, sizes, list(combinations)), nprocs=ranks)
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    return [max(peaks) for peaks in zip(*found, strict=True)]


def _rank(rank: int, ranks: int, folder: str, name: str, sizes: dict[str, Any], combinations: list[Levers]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    peaks = [_peak(name, sizes, levers) for levers in combinations]
    (Path(folder) / f"{rank}.json").write_text(json.dumps(peaks))
    distributed.destroy_process_group()


def _peak(name: str, sizes: dict[str, Any], levers: Levers) -> int:
    example = zoo.build(name, **{**sizes, "batch": levers.micro_batch * levers.accumulation})
    made = set_up(example.model, make_optimizer_of(levers.optimizer, example.model), levers)
    args, kwargs = example.args, dict(example.kwargs)
    del example
    for _ in range(4):
        made.train_step(*args, **kwargs)
    gc.collect()
    return min(_measured(made, args, kwargs) for _ in range(MEASURED))


def _measured(made: Any, args: Any, kwargs: Any) -> int:
    distributed.barrier()
    return remat.measure(made.train_step, *args, **kwargs).peak_bytes
