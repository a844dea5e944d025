"""One process that pretends to be rank 0, against real ranks: the same peaks, plainly and under its plan."""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

from benchmarks.many_ranks import run_ranks
from benchmarks.ranks.models import RESULTS, SIZES
from benchmarks.runs import save_results

ENGINES = ("ddp", "zero1", "fsdp", "fsdp:keep")


def add_to(modes: Any) -> None:
    found = modes.add_parser("pretend")
    found.add_argument("--worlds", default="2,4")
    found.add_argument("--models", default=",".join(SIZES))
    found.add_argument("--engines", default=",".join(ENGINES))
    found.set_defaults(run=pretend)


def pretend(options: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for world in map(int, options.worlds.split(",")):
        for name in options.models.split(","):
            for engine in options.engines.split(","):
                row = compared(name, engine, world)
                print(row, flush=True)
                keep(RESULTS / "distributed_pretended.json", row)


def compared(name: str, engine: str, world: int) -> dict[str, Any]:
    """Peaks of rank 0, pretended and real, plainly and under one plan."""
    import torch

    from remat import zoo
    from remat.distributed.pretended import plan_pretended, pretended

    torch.manual_seed(0)
    family, sizes = SIZES[name]
    example = zoo.build(family, **sizes)
    asked = {"engine": engine, "ranks": world, "budget": "0.7x"}
    made = plan_pretended(example.model, example.args, example.kwargs, **asked)
    row: dict[str, Any] = {"model": name, "engine": engine, "world": world, "predicted": made.plan.predicted_peak}
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "plan.json")
        made.plan.save(Path(file))
        for what, given in (("plain", None), ("planned", file)):
            with pretended(world):
                row[f"{what}_pretended"] = peak_of(name, engine, given)
            row[f"{what}_real"] = run_ranks(real_peak, name, engine, given, world=world)[0]
    return row


def keep(path: Path, row: dict[str, Any]) -> None:
    """Put a row in the place of the one for the same case, if there is one."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def case(item: dict[str, Any]) -> tuple[Any, ...]:
        return item["world"], item["model"], ENGINES.index(item["engine"])

    save_results(path, sorted([*(item for item in rows if case(item) != case(row)), row], key=case))


def peak_of(name: str, engine: str, plan_file: str | None = None) -> list[int]:
    """Peaks of three steps of a rank, real or pretended, plainly or under a plan that was made before."""
    import torch

    import remat
    from remat import zoo
    from remat.distributed.pretended import optimizer_of, parallel

    torch.manual_seed(0)
    family, sizes = SIZES[name]
    example = zoo.build(family, **sizes)
    model = parallel(example.model, engine)
    optimizer = optimizer_of(model, engine, 1e-3)
    if plan_file is not None:
        model = remat.apply(model, remat.Plan.load(plan_file))
    kept = [optimizer]

    def step() -> None:
        model(*example.args).backward()
        kept[0].zero_grad()

    for _ in range(3):
        model(*example.args).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [remat.measure(step).peak_bytes for _ in range(3)]


def real_peak(rank: int, name: str, engine: str, plan_file: str | None) -> list[int]:
    warnings.simplefilter("ignore")
    return peak_of(name, engine, plan_file)
