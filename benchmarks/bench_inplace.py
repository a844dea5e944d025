"""What overwriting and another order save: measured peaks and times of zoo models, nothing recomputed.

    python -m benchmarks.bench_inplace [--device cuda] [--scale demo] [--models gpt,resnet18] [--pairs 9]
    python -m benchmarks.bench_inplace --published --ways both,0.9x --pairs 3

Ways to run the same step, each beside plain eager PyTorch in turns:

- `masks`: every op once in its own order, nothing overwritten; what is kept as bytes is.
- `in place`, `order`, `both`: the same with ops that overwrite dying inputs, with ops moved, and with both.
- `0.9x`: both, and as much computed again as that share of the plain peak takes, if any.

`limit` is what is in memory between forward and backward over the plain peak: whatever the order and whatever is
overwritten, a step that computes every op once needs as much. Peaks and times are measured; loss, gradients, buffers
and generators are compared bit for bit with those of plain eager.

`--published` takes the shapes of published models at a small batch: images of 224 x 224, vocabularies of 10,000 to
50,000 words, sequences of 512 or 1024.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from benchmarks.runs import save_results

import remat
from remat import zoo
from remat.core.eager import without_overwrites
from remat.core.graph import OpId
from remat.core.problem import Problem
from remat.core.results.plan import Plan
from remat.core.schedule import Schedule
from remat.core.simulate import simulate
from remat.errors import InfeasibleBudget
from remat.pytorch.device import rules_of
from remat.pytorch.explore.captured_step import CapturedStep, prepare
from remat.pytorch.measure.measure_step import measure_once
from remat.solvers.schedule.order import order_ops
from remat.within import solve_within

SHARE = 0.9
PUBLISHED: Mapping[str, Mapping[str, float]] = {
    "gpt": dict(batch=1, length=1024, vocabulary=50257, width=768, depth=12, heads=12),
    "bert": dict(batch=2, length=512, vocabulary=30522, width=768, depth=12, heads=12),
    "vit": dict(batch=8, side=224, patch=16, classes=1000, width=768, depth=12, heads=12),
    "resnet18": dict(batch=8, side=224, classes=1000, width=64, shrink=4),
    "resnet50": dict(batch=8, side=224, classes=1000, width=64, shrink=4),
    "lstm": dict(batch=20, length=35, vocabulary=10000, width=650, depth=2, dropout=0.5),
    "llama": dict(batch=1, length=1024, vocabulary=32000, width=768, depth=12, heads=12, key_heads=4, hidden=2048),
}
"""GPT-2 small, BERT base, ViT-B/16, He et al., Zaremba et al. (medium), and a Llama of 110 million parameters."""


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


def ways(subject: CapturedStep, seconds: float) -> Mapping[str, Callable[[], Plan | None]]:
    """Every way to run the step: how to get its plan, if there is one."""
    problem = subject.problem
    plain = without_overwrites(problem)
    own = tuple(range(len(problem.graph.ops)))
    return {
        "masks": lambda: planned(subject, plain, own),
        "in place": lambda: planned(subject, problem, own),
        "order": lambda: planned(subject, plain, order_ops(plain).order),
        "both": lambda: planned(subject, problem, order_ops(problem).order),
        f"{SHARE}x": lambda: within(subject, SHARE, seconds),
    }


def planned(subject: CapturedStep, problem: Problem, order: tuple[int, ...]) -> Plan:
    schedule = Schedule(tuple(OpId(number) for number in order))
    timeline = simulate(problem, schedule)
    solution = replace(
        subject.base.solution, schedule=schedule, peak_bytes=timeline.peak_bytes, time_ns=timeline.time_ns
    )
    slack = subject.slack_bytes(problem, schedule)
    return replace(subject.base, problem=problem, solution=solution, allocator_slack_bytes=slack)


def within(subject: CapturedStep, share: float, seconds: float) -> Plan | None:
    """Remat's plan for `share` of the plain peak."""
    problem = subject.problem.with_budget(int(share * subject.base.plain_peak_bytes))
    try:
        rules = rules_of(subject.device)
        solution, slack = solve_within(problem, "auto", rules=rules, time_limit_s=seconds)
    except InfeasibleBudget:
        return None
    return replace(subject.base, problem=problem, solution=solution, allocator_slack_bytes=slack)


def run(name: str, options: argparse.Namespace) -> Result:
    sizes = PUBLISHED[name] if options.published else {}
    example = zoo.build(name, scale=options.scale, device=options.device, **sizes)
    example.model.train()
    subject = prepare(example.model, example.args, example.kwargs)
    plain = measure_once(example.model, *example.args, **example.kwargs).peak_bytes
    rows = []
    for way, make in ways(subject, options.time_limit).items():
        plan = make() if way in options.ways.split(",") or not options.ways else None
        if plan is None:
            continue
        found = subject.run_plan(plan, options.pairs)
        same = remat.verify(example.model, subject.planned, *example.args, **example.kwargs)
        saved = 1 - found.peak_bytes / plain
        rows.append(Row(name, way, found.peak_bytes, plan.predicted_peak, saved, found.ratio, plan.overhead, same.ok))
        show(rows[-1])
    return Result(name, plain, limit_bytes(subject) / plain, tuple(rows))


def limit_bytes(subject: CapturedStep) -> int:
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
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--models", default="")
    parser.add_argument("--ways", default="", help="such as both,0.9x; all of them otherwise")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds for each solve")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    print(f"{'model':10} {'way':12} {'peak':>12} {'predicted':>12} {'saved':>7} {'ratio':>7} {'again':>7} bits")
    results = []
    names = options.models or ",".join(PUBLISHED if options.published else zoo.REGISTRY)
    for name in names.split(","):
        results.append(run(name, options))
        print(f"{name:10} plain {results[-1].plain_bytes}, limit {results[-1].limit:.4f}", flush=True)
        path = options.output / f"inplace_{options.device}{'_published' if options.published else ''}.json"
        save_results(path, [asdict(result) for result in results])


if __name__ == "__main__":
    main()
