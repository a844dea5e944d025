"""Engines, budgets and models: losses and parameters with equal bits, peaks within the budget and as predicted."""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.many_ranks import run_ranks
from benchmarks.ranks.models import HOWS, RESULTS, SIZES, UNSHOWN, built, digest, optimizer_for, plan_digest
from benchmarks.runs import save_results


def add_to(modes: Any) -> None:
    found = modes.add_parser("sweep")
    found.add_argument("--worlds", default="2,4")
    found.add_argument("--models", default="gpt,resnet")
    found.add_argument("--budgets", default="0.8x,0.6x")
    found.add_argument("--hows", default=",".join((*HOWS, "zero1 inside")))
    found.add_argument("--steps", type=int, default=10)
    found.set_defaults(run=sweep)


def sweep(options: argparse.Namespace) -> None:
    path = RESULTS / "distributed_sweep.json"
    for world in map(int, options.worlds.split(",")):
        for name in options.models.split(","):
            for how in options.hows.split(","):
                shares = options.budgets.split(",")
                found = run_ranks(trained_all, how, name, shares, options.steps, world=world)
                if all(isinstance(item, dict) for item in found):
                    rows = [judged(how, name, world, share, found) for share in shares]
                else:
                    asked = {"how": how, "model": name, "world": world}
                    rows = [{**asked, "budget": share, "failed": str(found)[:500]} for share in shares]
                for row in rows:
                    print(*(row[key] for key in row if key not in UNSHOWN), flush=True)
                    keep(path, row)


def trained(rank: int, how: str, name: str, share: str | None, steps: int) -> dict[str, Any]:
    import torch

    import remat
    from remat import zoo

    torch.manual_seed(0)
    family, sizes = SIZES[name]
    example = zoo.build(family, **sizes)
    model = built(how, example.model, share)
    optimizer = optimizer_for(how, model)

    def batch(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(example.args[0]), generator=generator)
        return [item[order] for item in example.args]

    losses, began = [], time.perf_counter()
    torch.manual_seed(rank)
    for number in range(steps):
        loss = model(*batch(100 * number + rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    seconds = time.perf_counter() - began
    data = batch(rank)
    kept = [optimizer]

    def step() -> None:
        model(*data).backward()
        kept[0].zero_grad()

    bits, peaks = digest(model), [remat.measure(step).peak_bytes for _ in range(3)]
    found = {"losses": losses, "bits": bits, "peaks": peaks, "seconds": seconds}
    if share is not None:
        plan = remat.plan_of(model)
        found |= {"budget": plan.budget_bytes, "predicted": plan.predicted_peak, "plain": plan.plain_peak_bytes}
        found |= {"plan": plan_digest(plan), "overhead": plan.overhead}
        found |= {"breakdown": dict(plan.breakdown_bytes)}
    return found


def trained_all(rank: int, how: str, name: str, shares: list[str], steps: int) -> dict[str, Any]:
    """Plainly and under each budget, in one process."""
    warnings.simplefilter("ignore")
    plain = trained(rank, how, name, None, steps)
    return {"plain": plain, **{share: trained(rank, how, name, share, steps) for share in shares}}


def judged(how: str, name: str, world: int, share: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    plain, ours = [item["plain"] for item in ranks], [item[share] for item in ranks]
    off = [abs(item["predicted"] / max(item["peaks"]) - 1) for item in ours]
    return {
        "how": how,
        "model": name,
        "world": world,
        "budget": share,
        "bits_equal": all(
            (a["losses"], a["bits"]) == (b["losses"], b["bits"]) for a, b in zip(plain, ours, strict=True)
        ),
        "within_budget": all(max(item["peaks"]) <= item["budget"] for item in ours),
        "one_plan": len({item["plan"] for item in ours}) == 1,
        "largest_error_percent": round(100 * max(off), 2),
        "peaks": [item["peaks"] for item in ours],
        "plain_peaks": [item["peaks"] for item in plain],
        "predicted": [item["predicted"] for item in ours],
        "budget_bytes": [item["budget"] for item in ours],
        "overhead_percent": round(100 * ours[0]["overhead"], 2),
    }


def keep(path: Path, row: dict[str, Any]) -> None:
    """Put a row in the place of the one for the same case, if there is one."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def case(item: dict[str, Any]) -> tuple[Any, ...]:
        return item["world"], item["model"], item["how"], item["budget"]

    save_results(path, sorted([*(item for item in rows if case(item) != case(row)), row], key=case))
