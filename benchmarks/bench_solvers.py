"""How good and how fast the solvers are, on instance files and generated graphs, each solve in a process of its own.

    python -m benchmarks.bench_solvers [FILE|FOLDER ...] [--generated [transformer:114,chain:100]] [--solvers auto,none]
        [--budgets 0.7x,0.5x,1.05floor | --sweep 12] [--time-limit 60] [--output benchmarks/results/solvers.json]

Without arguments: the instances beside this file. A budget is bytes, a share of the plain peak ("0.5x") or of the
largest single op ("1.05floor"). Overhead and bound are in per cent over the plain time; "first" is when the first
schedule that fits was there. A process that hangs is ended and counted as such; memory is the process's peak, imports
included.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.runs import save_results

from remat.core import Problem, floor_bytes, load_problem, parse_budget, validate
from remat.core.search.limits import Limits
from remat.solvers import Progress, get_solver
from remat.solvers.sweep import plain_peak_bytes, sweep_budgets
from remat.zoo.synthetic import GENERATORS

HERE = Path(__file__).parent
GENERATED = (
    "transformer:24,transformer:114,random_layered:100,random_layered:250,random_layered:500,"
    "chain:100,unet_like:4,densenet_like:20,tree:5"
)
HANG_S = 120.0
"""Beyond twice the time limit, what a process may take before it is ended."""


@dataclass(frozen=True, slots=True)
class Row:
    instance: str
    ops: int
    share: float
    """Of the plain peak."""
    budget_bytes: int
    solver: str
    status: str
    overhead: float | None
    bound: float | None
    gap: float | None
    first_s: float | None
    seconds: float
    peak_rss_mib: float
    min_budget_bytes: int | None = None
    """The smallest budget for which a schedule is known; where one was found, not looked for any further."""
    reason: str = ""


def load(name: str) -> Problem:
    """An instance file, or a generator and its size, as `chain:100`."""
    if Path(name).suffix == ".json":
        return load_problem(Path(name))
    kind, size = name.split(":")
    return GENERATORS[kind](int(size))


def solve_once(name: str, budget: int, solver: str, time_limit_s: float, seed: int) -> Row:
    """Solve in this process and say what came of it."""
    problem = load(name).with_budget(budget)
    base, firsts = problem.base_time_ns, []
    start = time.perf_counter()

    def note(progress: Progress) -> None:
        if not firsts and progress.time_ns < float("inf"):
            firsts.append(time.perf_counter() - start)

    solution = get_solver(solver).solve(problem, Limits(time_limit_s, seed=seed), progress=note)
    seconds = time.perf_counter() - start
    found = solution if solution.schedule is not None else None
    if found is not None and found.schedule is not None:
        validate(problem, found.schedule)
    return Row(
        instance=label(name),
        ops=len(problem.graph.ops),
        share=budget / max(1, plain_peak_bytes(problem)),
        budget_bytes=budget,
        solver=solver,
        status=solution.status.value,
        overhead=over(found.time_ns, base) if found else None,
        bound=over(found.bound_ns, base) if found else None,
        gap=found.gap if found else None,
        first_s=(firsts[0] if firsts else seconds) if found else None,
        seconds=seconds,
        peak_rss_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        min_budget_bytes=solution.min_budget_bytes,
        reason=solution.reason,
    )


def over(time_ns: float, base: float) -> float:
    return time_ns / base - 1 if base > 0 else 0.0


def label(name: str) -> str:
    return Path(name).stem if name.endswith(".json") else name.replace(":", "_")


def in_own_process(name: str, budget: int, solver: str, options: argparse.Namespace) -> Row:
    once = json.dumps([name, budget, solver, options.time_limit, options.seed])
    command = [sys.executable, "-m", "benchmarks.bench_solvers", "--once", once]
    limit = 2 * options.time_limit + HANG_S
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return failed(name, budget, solver, "HANGS", limit)
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
        return failed(name, budget, solver, "FAILS", 0.0)
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def failed(name: str, budget: int, solver: str, status: str, seconds: float) -> Row:
    problem = load(name)
    share = budget / max(1, plain_peak_bytes(problem))
    ops = len(problem.graph.ops)
    return Row(label(name), ops, share, budget, solver, status, None, None, None, None, seconds, 0.0)


def budgets_of(problem: Problem, options: argparse.Namespace) -> Iterator[int]:
    if options.sweep:
        yield from sweep_budgets(problem, options.sweep)
        return
    for text in options.budgets.split(","):
        if text.endswith("floor"):
            yield int(float(text.removesuffix("floor")) * floor_bytes(problem)[0])
        else:
            yield parse_budget(text).resolve(plain_peak_bytes=plain_peak_bytes(problem), device_bytes=0)


def names_of(options: argparse.Namespace) -> list[str]:
    paths = options.paths or ([] if options.generated else [HERE / "instances"])
    files = [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    return [*map(str, files), *(options.generated.split(",") if options.generated else [])]


HEADER = "instance", "ops", "share", "solver", "overhead", "bound", "gap", "first", "total", "status", "memory"
WIDTHS = 22, 6, 7, 14, 13, 10, 8, 8, 8, 11, 9


def write_line(*cells: str) -> None:
    left, *rest = zip(cells, WIDTHS, strict=True)
    print(f"{left[0]:<{left[1]}}" + "".join(f"{text:>{width}}" for text, width in rest), flush=True)


def show(row: Row) -> None:
    percent = [f"{share:.3%}" if share is not None else "–" for share in (row.overhead, row.bound, row.gap)]
    first = f"{row.first_s:.2f} s" if row.first_s is not None else "–"
    if row.overhead is None and row.min_budget_bytes is not None:
        # Nothing was found: the smallest share of the plain peak for which something is known.
        percent[0] = f"fits {row.share * row.min_budget_bytes / row.budget_bytes:.3f}x"
    total, memory = f"{row.seconds:.1f} s", f"{row.peak_rss_mib:.0f} MiB"
    write_line(row.instance, str(row.ops), f"{row.share:.3f}", row.solver, *percent, first, total, row.status, memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="*", metavar="FILE|FOLDER")
    parser.add_argument("--generated", nargs="?", const=GENERATED, default="")
    parser.add_argument("--solvers", default="auto")
    parser.add_argument("--budgets", default="0.7x,0.5x,0.35x,1.05floor")
    parser.add_argument("--sweep", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "solvers.json")
    parser.add_argument("--once", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(asdict(solve_once(*json.loads(options.once)))))
        return
    rows = []
    write_line(*HEADER)
    for name in names_of(options):
        for budget in budgets_of(load(name), options):
            for solver in options.solvers.split(","):
                rows.append(in_own_process(name, budget, solver, options))
                show(rows[-1])
    facts = {"time_limit_s": options.time_limit, "seed": options.seed, "rows": [asdict(row) for row in rows]}
    save_results(options.output, facts)


if __name__ == "__main__":
    main()
