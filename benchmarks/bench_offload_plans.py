"""Plans that keep, compute again or copy to the host, of the instances beside this file: how fast, and how far proven.

    python -m benchmarks.bench_offload_plans [FILE ...] [--budgets 0.5x 0.25x] [--time-limit 60] [--link 0.24]
        [--clock wall|cpu] [--jobs 1] [--output benchmarks/results/offload_plans.json]

The instances' times are a CPU's, so the link is told in their own measure: it moves `--link` of the plain peak in the
time of the plain step, each way. For 50 GB/s beside an H200 that is 0.24 for eager steps of GPT-2 medium (224 ms, 43.6
GiB) and BERT-large (117 ms, 22.6 GiB). Each row has the answer by recomputation alone and the one with copies, both
with the whole time limit, in per cent over the plain time. On a machine that others use, `--clock cpu` counts what the
process itself takes. Rows are saved as they come.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.runs import save_results

from remat.core import Problem, ValueId, load_problem, parse_budget, plain_schedule, simulate, validate
from remat.core.copies import Link, with_copies
from remat.core.engines import follow_copies
from remat.core.search.limits import Limits
from remat.solvers import get_solver
from remat.solvers.offloading import Offloading
from remat.solvers.overwriting import Overwriting
from remat.solvers.schedule.to_host import stays
from remat.solvers.sweep import plain_peak_bytes

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.monotonic, "cpu": time.process_time}
HERE = Path(__file__).parent
NAMES = "bert", "gpt", "llama", "mlp", "resnet18", "resnet50", "unet", "vit"


@dataclass(frozen=True, slots=True)
class Row:
    instance: str
    budget: str
    recomputing: float | None
    """Overhead by recomputation alone; None where nothing fits."""
    recomputing_gap: float | None
    overhead: float | None
    bound: float | None
    gap: float | None
    copied_bytes: int
    waited_share: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Case:
    path: Path
    budget: str
    link: float
    time_limit_s: float
    clock: str
    seed: int

    def limits(self) -> Limits:
        return Limits(self.time_limit_s, seed=self.seed, clock=CLOCKS[self.clock])


def movable(problem: Problem, link: float) -> Problem:
    """The problem whose values may leave by a link of that speed: those that a plain step has idle for a while."""
    rate = link * plain_peak_bytes(problem) / problem.base_time_ns
    found = Link(rate, rate)
    idle = sorted(stay.value for stay in stays(problem, plain_schedule(problem.graph)))
    return with_copies(problem, [found.movable(ValueId(v), problem.costs.size_bytes[v]) for v in idle])


def answer(case: Case) -> Row:
    problem = load_problem(case.path)
    budget = parse_budget(case.budget).resolve(plain_peak_bytes=plain_peak_bytes(problem), device_bytes=0)
    problem = problem.with_budget(budget)
    base = problem.base_time_ns
    recomputing = recomputing_gap = overhead = bound = gap = None
    copied, waited = 0, 0.0
    solver, clock = Offloading(Overwriting(get_solver("auto"), goes_on=True)), CLOCKS[case.clock]
    # What does not fit has no figures.
    alone = solver.solve(problem, case.limits())
    if alone.schedule is not None:
        recomputing, recomputing_gap = alone.time_ns / base - 1, alone.gap
    began = clock()
    moving = movable(problem, case.link)
    found = solver.solve(moving, case.limits())
    if found.schedule is not None:
        validate(moving, found.schedule)
        engines = follow_copies(moving, found.schedule)
        overhead, bound, gap = simulate(moving, found.schedule).time_ns / base - 1, found.bound_ns / base - 1, found.gap
        copied, waited = engines.host_peak_bytes, engines.waited_ns / base
    seconds = clock() - began
    return Row(case.path.stem, case.budget, recomputing, recomputing_gap, overhead, bound, gap, copied, waited, seconds)


def percent(share: float | None) -> str:
    return f"{share:.2%}" if share is not None else "–"


def show(row: Row) -> None:
    figures = (row.recomputing, row.recomputing_gap, row.overhead, row.bound, row.gap, row.waited_share)
    cells = "".join(f"{percent(figure):>10}" for figure in figures)
    print(f"{row.instance:14}{row.budget:>8}{cells}{row.copied_bytes / 2**20:9.0f} MiB{row.seconds:7.1f} s", flush=True)


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for path in options.paths or [HERE / "instances" / f"{name}.json" for name in NAMES]:
        for budget in options.budgets:
            yield Case(path, budget, options.link, options.time_limit, options.clock, options.seed)


def save(options: argparse.Namespace, rows: list[Row]) -> None:
    facts = {"time_limit_s": options.time_limit, "clock": options.clock, "link": options.link}
    save_results(options.output, {**facts, "rows": [asdict(row) for row in rows]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="*", metavar="FILE")
    parser.add_argument("--budgets", nargs="+", default=["0.5x", "0.25x"])
    parser.add_argument("--link", type=float, default=0.24)
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    heads = "recompute", "gap", "copies", "bound", "gap", "waits"
    print(f"{'instance':14}{'budget':>8}{''.join(f'{head:>10}' for head in heads)}{'on host':>13}{'time':>9}")
    rows = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for row in pool.map(answer, cases(options)):
            show(row)
            rows.append(row)
            if options.output is not None:
                save(options, rows)


if __name__ == "__main__":
    main()
