"""How low and how fast layout solvers place buffers: MiniMalloc's files, training steps and generated problems.

    python -m benchmarks.bench_layout [FILE …] [--capacity 1048576] [--time-limit 60] [--solver auto …] [--output FILE]

FILE is a CSV of buffers, placed below the capacity (the number in a name like A.1048576.csv, or --capacity), or a
problem or instance file, whose plain schedule's storages are placed as low as possible. Without a FILE the instances
beside this script and the project's generators are used. Every placement is checked by `validate`, which shares no
code with the solvers; "over load" is how much higher it is than the most that is alive at one time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.runs import save_results

from remat.core.files.problem_file import load_problem
from remat.core.schedule import plain_schedule
from remat.layout import REGISTRY, LayoutProblem, get_solver, lifetimes, load, place, validate
from remat.layout.csv_file import load_csv
from remat.layout.synthetic import dissected, random_lives, training

HERE = Path(__file__).parent


def problems(options: argparse.Namespace) -> Iterator[tuple[str, LayoutProblem]]:
    for path in options.files or sorted((HERE / "instances").glob("*.json")):
        yield path.stem, read(path, options.capacity)
    if not options.files:
        yield "dissected 200", dissected(200)
        yield "dissected 400", dissected(400, seed=1)
        yield "training 48 layers", training(48)
        yield f"random {options.random}", random_lives(options.random)
        yield f"random long {options.random}", random_lives(options.random, longest=100_000)


def read(path: Path, capacity: int | None) -> LayoutProblem:
    if path.suffix == ".csv":
        middle = path.stem.rpartition(".")[2]
        return load_csv(path, int(middle) if capacity is None and middle.isdigit() else capacity)
    problem = load_problem(path)
    return LayoutProblem(lifetimes(problem, plain_schedule(problem.graph)), capacity)


def measure(name: str, problem: LayoutProblem, solver: str, time_limit_s: float) -> dict[str, object]:
    start = time.perf_counter()
    placement = place(problem, solver, time_limit_s=time_limit_s)
    seconds = time.perf_counter() - start
    validate(problem, placement)
    floor = load(problem)
    return {
        "problem": name,
        "buffers": len(problem.buffers),
        "capacity": problem.capacity,
        "solver": solver,
        "status": placement.status.value,
        "height": placement.height,
        "load": floor,
        "bound": placement.bound,
        "over_load": placement.height / floor - 1 if floor else 0.0,
        "seconds": seconds,
    }


def show(row: dict[str, object]) -> None:
    print(
        f"{row['problem']:<28} {row['buffers']:>6} {row['solver']:<13} {row['status']:<11} {row['height']:>14} "
        f"{row['over_load']:>9.2%} {row['seconds']:>8.2f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--capacity", type=int)
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--solver", action="append", help="may be repeated; all of them where left out")
    parser.add_argument("--random", type=int, default=50_000, help="buffers of the random problems")
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    names = options.solver or [solver.name for solver in REGISTRY]
    for name in names:
        get_solver(name)
    print(f"{'problem':<28} {'n':>6} {'solver':<13} {'status':<11} {'height':>14} {'over load':>9} {'time':>10}")
    rows = []
    for name, problem in problems(options):
        for solver in names:
            rows.append(measure(name, problem, solver, options.time_limit))
            show(rows[-1])
    if options.output is not None:
        save_results(options.output, rows)


if __name__ == "__main__":
    main()
