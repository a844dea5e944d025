"""How high the arena of real training steps is: every model of the zoo and GPT-2, as they are and planned.

    python -m benchmarks.bench_arena [FILE …] [--budget 0.6x] [--time-limit 9] [--output benchmarks/results/layout.json]

FILE is a problem, instance or plan file; without one, all instances beside this script. Each is laid out in its plain
order and, if it is no plan, under a plan for the budget, with the time limit and until proven to be within 0.2 % of
the lowest arena. "over load" is how much higher it is than the most that is alive at one time, which no arena can be
below; "first fit" is the same for buffers that are placed as they come; "in place" is the arena where results are
written over their dying inputs. Blocks have 512 bytes. Every placement is checked by `validate`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.runs import save_results

from remat.core.budget import parse_budget
from remat.core.files.problem_file import load_problem
from remat.core.memory_rules import CUDA
from remat.core.problem import Problem
from remat.core.results.plan import Plan
from remat.core.schedule import Schedule, plain_schedule
from remat.core.simulate import simulate
from remat.errors import FileFormatError, InfeasibleBudget
from remat.layout import Buffer, LayoutAuto, LayoutProblem, lifetimes, load, place, storages_of
from remat.layout.arena import GAP
from remat.layout.storages import choose_in_place, merged
from remat.solvers import solve

HERE = Path(__file__).parent
SOLVE_S = 10.0


@dataclass(frozen=True, slots=True)
class Row:
    step: str
    schedule: str
    buffers: int
    total_bytes: int
    load_bytes: int
    arena_bytes: int
    over_load: float
    seconds: float
    first_fit_over_load: float
    in_place_arena_bytes: int


def steps(paths: list[Path], budget: str) -> Iterator[tuple[str, str, Problem, Schedule]]:
    for path in paths:
        try:
            plan = Plan.load(path)
        except FileFormatError:
            problem = load_problem(path)
            plain = plain_schedule(problem.graph)
            yield path.stem, "plain", problem, plain
            yield from planned(path.stem, problem, plain, budget)
            continue
        if plan.schedule is not None:
            yield path.stem, "plan", plan.problem, plan.schedule


def planned(name: str, problem: Problem, plain: Schedule, budget: str) -> Iterator[tuple[str, str, Problem, Schedule]]:
    peak = simulate(problem, plain).peak_bytes
    limit = parse_budget(budget).resolve(plain_peak_bytes=peak, device_bytes=0)
    try:
        found = solve(problem.with_budget(limit), "auto", time_limit_s=SOLVE_S).schedule
    except InfeasibleBudget as error:
        print(f"{name}: {error}", flush=True)
        return
    if found is not None:
        yield name, budget, problem, found


def measure(name: str, kind: str, problem: Problem, schedule: Schedule, time_limit_s: float) -> Row:
    buffers = lifetimes(problem, schedule, block_bytes=CUDA.address_step_bytes)
    least = load(LayoutProblem(buffers))
    start = time.perf_counter()
    height = arena(buffers, time_limit_s)
    seconds = time.perf_counter() - start
    storages = storages_of(problem, schedule, block_bytes=CUDA.address_step_bytes)
    in_place = arena(merged(storages, choose_in_place(storages)), time_limit_s)
    return Row(
        step=name,
        schedule=kind,
        buffers=len(buffers),
        total_bytes=sum(buffer.size for buffer in buffers),
        load_bytes=least,
        arena_bytes=height,
        over_load=height / least - 1,
        seconds=seconds,
        first_fit_over_load=place(LayoutProblem(buffers), "first_fit").height / least - 1,
        in_place_arena_bytes=min(height, in_place),
    )


def arena(buffers: tuple[Buffer, ...], time_limit_s: float) -> int:
    return place(LayoutProblem(buffers), LayoutAuto(gap=GAP), time_limit_s=time_limit_s).height


def show(row: Row) -> None:
    total, least, height = (count / 2**20 for count in (row.total_bytes, row.load_bytes, row.arena_bytes))
    print(
        f"{row.step:<14} {row.schedule:<6} {row.buffers:>6} {total:>10.1f} {least:>9.1f} {height:>9.1f} "
        f"{row.over_load:>9.3%} {row.seconds:>7.2f} s {row.first_fit_over_load:>9.2%} "
        f"{row.in_place_arena_bytes / row.arena_bytes - 1:>9.2%}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--budget", default="0.6x")
    parser.add_argument("--time-limit", type=float, default=9.0)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "layout.json")
    options = parser.parse_args()
    columns = f"{'step':<14} {'':<6} {'n':>6} {'sum, MiB':>10} {'load':>9} {'arena':>9} {'over load':>9}"
    print(f"{columns} {'time':>9} {'first fit':>9} {'in place':>9}")
    rows = []
    for found in steps(options.files or sorted((HERE / "instances").glob("*.json")), options.budget):
        rows.append(measure(*found, options.time_limit))
        show(rows[-1])
    save_results(options.output, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
