"""Parameters that are gathered again or kept, in the graph and by FSDP2; and compiled kernels over ranks."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.gathers import LINKS, compared, resharded, trained_compiled, trained_sharded
from benchmarks.many_ranks import run_ranks
from benchmarks.ranks.models import RESULTS
from benchmarks.runs import save_results

COMPILED = ("ddp inside", "ddp outside", "fsdp keep outside", "fsdp keep inside", "fsdp free outside")


def add_to(modes: Any) -> None:
    found = modes.add_parser("gathers")
    found.add_argument("--ranks", type=int, default=8)
    found.add_argument("--points", type=int, default=5)
    found.add_argument("--seconds", type=float, default=2.0)
    found.add_argument("--budgets", default="0.8x,0.6x")
    found.set_defaults(run=gathers)
    found = modes.add_parser("reshard")
    found.add_argument("--budgets", default="0.8x")
    found.set_defaults(run=reshard)
    found = modes.add_parser("compiled")
    found.add_argument("--hows", default=",".join(COMPILED))
    found.add_argument("--steps", type=int, default=5)
    found.set_defaults(run=compiled)


def gathers(options: argparse.Namespace) -> None:
    """Predictions at many budgets, and steps over gloo: bits and peaks."""
    rows = []
    for link in LINKS:
        rows += compared(options.ranks, link, options.points, options.seconds)
        print(link, [row["never_slower"] for row in rows[-options.points :]], flush=True)
    ran = []
    plain = run_ranks(trained_sharded, None, 5, world=2)
    for share in options.budgets.split(","):
        found = run_ranks(trained_sharded, share, 5, world=2)
        row: dict[str, Any] = {"budget": share, "world": 2, **{key: found[0][key] for key in ("again", "gathers")}}
        row["bits_equal"] = [(item["losses"], item["bits"]) for item in found] == [
            (item["losses"], item["bits"]) for item in plain
        ]
        row["within_budget"] = all(max(item["peaks"]) <= item["budget"] for item in found)
        row["largest_error_percent"] = round(
            100 * max(abs(item["predicted"] / max(item["peaks"]) - 1) for item in found), 2
        )
        ran.append(row)
        print(row, flush=True)
        save_results(RESULTS / "distributed_gathers.json", {"predicted": rows, "ran": ran})


def reshard(options: argparse.Namespace) -> None:
    """Which blocks of FSDP2 keep their parameters, against all of them and none."""
    rows = []
    for share in options.budgets.split(","):
        found = run_ranks(resharded, share, world=2)
        rows.append({"budget": share, "world": 2, "ranks": found})
        print(rows[-1], flush=True)
    save_results(RESULTS / "distributed_reshard.json", rows)


def compiled(options: argparse.Namespace) -> None:
    """torch.compile's kernels under DDP and FSDP2: losses within 1e-5 of plain eager's, peaks within the budget."""
    rows = []
    for how in options.hows.split(","):
        found = run_ranks(trained_compiled, how, "0.8x", options.steps, world=2, wait_s=600)
        rows.append({"how": how, "ranks": found})
        print(rows[-1], flush=True)
        save_results(RESULTS / "distributed_compiled.json", rows)
