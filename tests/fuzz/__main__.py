"""`python -m tests.fuzz`: many random modules, each in eager and under three budgets; see `--help`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.pool import Request, Result, run_cases

FINE = ("ok", "refused", "warned unplanned", "warned, over budget", "discarded")


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each failure and a summary; 1 where anything failed."""
    asked = _parser().parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    end = time.monotonic() + 60 * asked.minutes if asked.minutes else float("inf")
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("REMAT_CACHE_DIR", folder)
        request = Request(asked.device, asked.compiler, asked.timeout)
        results = []
        for result in run_cases(range(asked.seed, asked.seed + asked.count), asked.jobs, request, end):
            results.append(result)
            if asked.verbose or result["verdict"] not in FINE:
                print(_line(result), flush=True)
            if asked.out:
                asked.out.write_text(json.dumps(results, indent=1))
    print(_summary(results))
    return int(any(result["verdict"] not in FINE for result in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="how many cases (100)")
    parser.add_argument("--seed", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes (1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compiler", choices=("inductor",), default=None, help="compare with tolerances")
    parser.add_argument("--minutes", type=float, default=0, help="begin no case after this time (no limit)")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one case (120)")
    parser.add_argument("--out", type=Path, help="write all results here, as JSON")
    parser.add_argument("--verbose", action="store_true", help="a line for every case")
    return parser


def _line(result: Result) -> str:
    return f"{result['verdict'].upper()} seed {result['seed']}: {result['case']} | {result['details']}"


def _summary(results: list[Result]) -> str:
    counts = Counter(result["verdict"] for result in results)
    found = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    seconds, cpu_seconds = (
        sum(result.get(name, 0.0) for result in results) / max(1, len(results)) for name in ("seconds", "cpu_seconds")
    )
    trials = [trial for result in results for trial in result["trials"] if trial["predicted_bytes"]]
    exact = sum(trial["measured_bytes"] == trial["predicted_bytes"] for trial in trials)
    near = sum(abs(trial["measured_bytes"] / trial["predicted_bytes"] - 1) <= 0.01 for trial in trials)
    lines = [
        f"{len(results)} cases: {found}",
        f"{seconds:.2f} s each, {cpu_seconds:.2f} s of them on a core",
        f"{len(trials)} planned budgets: predicted peak measured to the byte at {exact}, within 1 % at {near}",
        _second_opinion(results, trials),
    ]
    return "\n".join(lines)


def _second_opinion(results: list[Result], trials: list[dict[str, int]]) -> str:
    reasons = {result.get("no_meter", "") for result in results} - {""}
    if reasons:
        return f"measured by remat.measure alone: {', '.join(sorted(reasons))}"
    same = sum(trial["metered_bytes"] == trial["measured_bytes"] for trial in trials)
    return f"the second meter gives remat.measure's peak to the byte at {same} of {len(trials)} budgets"


if __name__ == "__main__":
    sys.exit(main())
