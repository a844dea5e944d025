"""What overwriting and another order save: measured peaks and times of zoo models, nothing recomputed.

    python benchmarks/bench_inplace.py [--device cuda] [--scale demo] [--models gpt,resnet18] [--pairs 9]

Ways to run the same step, each beside plain eager PyTorch in turns:

- `masks`: every op once in its own order, nothing overwritten; what is kept as bytes is.
- `in place`, `order`, `both`: the same with ops that overwrite dying inputs, with ops moved, and with both.
- `0.9x`: both, and as much computed again as that share of the plain peak takes, if any.

`limit` is what is in memory between forward and backward over the plain peak: whatever the order and whatever is
overwritten, a step that computes every op once needs as much. Peaks and times are measured; loss, gradients, buffers
and generators are compared bit for bit with those of plain eager.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import remat
from remat import zoo
from remat.core.eager import without_overwrites
from remat.core.graph import OpId
from remat.core.plan import Plan
from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.simulate import simulate
from remat.errors import InfeasibleBudget
from remat.pipeline import solve_within
from remat.pytorch.subject import Subject, prepare
from remat.pytorch.track import measure_once
from remat.solvers.order import order_ops

SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Row:
    model: str
    way: str
    peak_bytes: int
    predicted_bytes: int
    saved: float
    """Of the measured peak of plain eager."""
    ratio: float
    """Step time over plain eager's, the median of pairs."""
    recomputed: float
    """Predicted share of the step's time."""
    same_bits: bool


@dataclass(frozen=True, slots=True)
class Result:
    model: str
    plain_bytes: int
    limit: float
    rows: tuple[Row, ...]


def ways(subject: Subject, seconds: float) -> Iterator[tuple[str, Plan]]:
    """Every way to run the step, as a plan."""
    problem = subject.problem
    plain = without_overwrites(problem)
    own = tuple(range(len(problem.graph.ops)))
    yield "masks", planned(subject, plain, own)
    yield "in place", planned(subject, problem, own)
    yield "order", planned(subject, plain, order_ops(plain).order)
    yield "both", planned(subject, problem, order_ops(problem).order)
    found = within(subject, SHARE, seconds)
    if found is not None:
        yield f"{SHARE}x", found


def planned(subject: Subject, problem: Problem, order: tuple[int, ...]) -> Plan:
    schedule = Schedule(tuple(OpId(number) for number in order))
    timeline = simulate(problem, schedule)
    solution = replace(
        subject.base.solution, schedule=schedule, peak_bytes=timeline.peak_bytes, time_ns=timeline.time_ns
    )
    slack = subject.slack_bytes(problem, schedule)
    return replace(subject.base, problem=problem, solution=solution, allocator_slack_bytes=slack)


def within(subject: Subject, share: float, seconds: float) -> Plan | None:
    """Remat's plan for `share` of the plain peak."""
    problem = subject.problem.with_budget(int(share * subject.base.plain_peak_bytes))
    try:
        on_cuda = subject.device.type == "cuda"
        solution, slack = solve_within(problem, "auto", on_cuda=on_cuda, time_limit_s=seconds)
    except InfeasibleBudget:
        return None
    return replace(subject.base, problem=problem, solution=solution, allocator_slack_bytes=slack)


def run(name: str, scale: str, device: str, pairs: int, seconds: float) -> Result:
    example = zoo.build(name, scale=scale, device=device)
    example.model.train()
    subject = prepare(example.model, example.args, example.kwargs)
    plain = measure_once(example.model, *example.args, **example.kwargs).peak_bytes
    rows = []
    for way, plan in ways(subject, seconds):
        found = subject.run_plan(plan, pairs)
        same = remat.verify(example.model, subject.planned, *example.args, **example.kwargs)
        saved = 1 - found.peak_bytes / plain
        rows.append(Row(name, way, found.peak_bytes, plan.predicted_peak, saved, found.ratio, plan.overhead, same.ok))
        show(rows[-1])
    return Result(name, plain, limit_bytes(subject) / plain, tuple(rows))


def limit_bytes(subject: Subject) -> int:
    """In memory when backward begins, every op having run once."""
    problem = subject.problem
    timeline = simulate(problem, Schedule(tuple(OpId(number) for number in range(len(problem.graph.ops)))))
    first = next(number for number, op in enumerate(problem.graph.ops) if op.backward)
    return timeline.live_bytes[first - 1]


def show(row: Row) -> None:
    print(
        f"{row.model:10} {row.way:12} {row.peak_bytes:>12} {row.predicted_bytes:>12} {row.saved:7.1%} {row.ratio:7.3f} "
        f"{row.recomputed:7.2%} {'same' if row.same_bits else 'DIFFERS'}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", default="demo", choices=zoo.SCALES)
    parser.add_argument("--models", default=",".join(zoo.REGISTRY))
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds for each solve")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    print(f"{'model':10} {'way':12} {'peak':>12} {'predicted':>12} {'saved':>7} {'ratio':>7} {'again':>7} bits")
    results = []
    for name in options.models.split(","):
        results.append(run(name, options.scale, options.device, options.pairs, options.time_limit))
        print(f"{name:10} plain {results[-1].plain_bytes}, limit {results[-1].limit:.4f}", flush=True)
        options.output.mkdir(parents=True, exist_ok=True)
        path = options.output / f"inplace_{options.device}.json"
        path.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
