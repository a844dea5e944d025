"""Pipelines over gloo, plainly and under budgets, several times where asked; and steps that fill their waits."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.many_ranks import run_ranks
from benchmarks.pipeline_ranks import timed
from benchmarks.pipeline_ranks import trained as trained_stages
from benchmarks.ranks.models import RESULTS, UNSHOWN
from benchmarks.runs import save_results

BUBBLES = {"gpipe": 2, "1f1b": 4}
"""Micro-batches of the schedules whose waits are filled."""


def add_to(modes: Any) -> None:
    found = modes.add_parser("pipelines")
    found.add_argument("--worlds", default="2,4")
    found.add_argument("--micros", default="4,8")
    found.add_argument("--kinds", default="gpipe,1f1b,interleaved,zero bubble,zbv")
    found.add_argument("--budgets", default="0.7x")
    found.add_argument("--steps", type=int, default=4)
    found.add_argument("--runs", type=int, default=1)
    found.set_defaults(run=pipelines)
    found = modes.add_parser("bubbles")
    found.add_argument("--budget", default="0.5x")
    found.add_argument("--rounds", type=int, default=40)
    found.add_argument("--kinds", default=",".join(BUBBLES))
    found.set_defaults(run=bubbles)


def pipelines(options: argparse.Namespace) -> None:
    """Losses, bits and peaks of stages; each case several times where asked."""
    path, shares = RESULTS / "distributed_pipelines.json", options.budgets.split(",")
    worlds, micros = (list(map(int, item.split(","))) for item in (options.worlds, options.micros))
    cases = [(world, kind, micro) for world in worlds for kind in options.kinds.split(",") for micro in micros]
    for world, kind, micro in cases:
        for _ in range(options.runs):
            found = run_ranks(trained_stages, world, kind, micro, shares, options.steps, world=world)
            for share in shares:
                row = judged_stages(kind, world, micro, share, found)
                print(*(row[key] for key in row if key not in UNSHOWN), flush=True)
                keep_run(path, row)


def judged_stages(kind: str, world: int, micros: int, share: str, ranks: list[Any]) -> dict[str, Any]:
    asked = {"kind": kind, "world": world, "micro_batches": micros, "budget": share}
    if not all(isinstance(item, dict) for item in ranks):
        return {**asked, "failed": str(ranks)[:500]}
    plain, ours = [item["plain"] for item in ranks], [item[share] for item in ranks]
    pairs = list(zip(plain, ours, strict=True))
    return {
        **asked,
        "equal": all((one["losses"], one["bits"]) == (other["losses"], other["bits"]) for one, other in pairs),
        "within_budget": all(max(item["peaks"]) <= item["budget"] for item in ours),
        "largest_error_percent": round(100 * max(abs(item["predicted"] / max(item["peaks"]) - 1) for item in ours), 3),
        "largest_plain_error_percent": round(
            100 * max(abs(other["plain"] / max(one["peaks"]) - 1) for one, other in pairs), 3
        ),
        "in_flight": [item["in_flight"] for item in ours],
        "overhead_percent": [round(100 * max(item["overhead"]), 2) for item in ours],
        "peaks": [item["peaks"] for item in ours],
        "plain_peaks": [item["peaks"] for item in plain],
        "predicted": [item["predicted"] for item in ours],
        "budget_bytes": [item["budget"] for item in ours],
    }


def keep_run(path: Path, row: dict[str, Any]) -> None:
    """Add a run to those of its case: how many there were, how many crashed, and the worst of each figure."""
    case = ("kind", "world", "micro_batches", "budget")
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    before = next((item for item in rows if all(item[key] == row[key] for key in case)), {})
    counted = {"runs": before.get("runs", 0) + 1, "crashes": before.get("crashes", 0) + ("failed" in row)}
    if "failed" in before or ("failed" not in row and "equal" in before):
        row = {**row, "equal": row["equal"] and before.get("equal", True)}
        row["within_budget"] = row["within_budget"] and before.get("within_budget", True)
        for key in ("largest_error_percent", "largest_plain_error_percent"):
            row[key] = max(row[key], before.get(key, 0.0))
    others = [item for item in rows if item is not before]
    ordered = sorted([*others, {**before, **row, **counted}], key=lambda item: [str(item[key]) for key in case])
    save_results(path, ordered)


SLOW_MS = 60.0, 120.0
"""Forward and backward of what another device does for the second stage, for each micro-batch."""


def bubbles(options: argparse.Namespace) -> None:
    """Steps in which the first of two ranks computes again while it waits for the second, or does not."""
    path = RESULTS / "distributed_bubbles.json"
    rows = {row["kind"]: row for row in json.loads(path.read_text(encoding="utf-8"))} if path.exists() else {}
    for kind in options.kinds.split(","):
        found = run_ranks(timed, kind, BUBBLES[kind], options.budget, options.rounds, SLOW_MS, world=2)
        if not all(isinstance(item, dict) for item in found):
            raise SystemExit(str(found))
        rows[kind] = compared_steps(kind, options, found)
        print({key: rows[kind][key] for key in rows[kind] if key != "trace_of_rank_0"}, flush=True)
        save_results(path, [rows[kind] for kind in BUBBLES if kind in rows])


def compared_steps(kind: str, options: argparse.Namespace, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of steps that fill their waits and of those beside them, of the first rank."""
    first = ranks[0]
    pairs = list(zip(first["filled_s"], first["unfilled_s"], strict=True))
    row = {"kind": kind, "micro_batches": BUBBLES[kind], "budget": options.budget, "rounds": options.rounds}
    row |= {"filled_s": statistics.median(one for one, _ in pairs)}
    row |= {"unfilled_s": statistics.median(other for _, other in pairs)}
    row |= {"gained_s": statistics.median(other - one for one, other in pairs)}
    row |= {"faster_rounds": sum(one < other for one, other in pairs), "slow_ms": SLOW_MS}
    row |= {key: first[key] for key in ("early_ms", "predicted_filled_ms", "predicted_unfilled_ms")}
    row |= {"within_budget": all(item["peak"] <= item["budget_bytes"] for item in ranks)}
    row |= {"early_in_trace": sum(event[0].startswith("remat") for event in first["trace"])}
    return {**row, "trace_of_rank_0": first["trace"]}
