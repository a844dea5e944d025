"""Keep, compute again or copy to the host: the step time that copies save, beside recomputation alone and torch's own.

    python -m benchmarks.bench_offload [--models gpt2-medium] [--budgets 0.3x] [--compiled 7.83GiB 5GiB] [--steps 10]

For each model and budget: Remat with recomputation alone, Remat with `offload="cpu"`, and torch's
`save_on_cpu(pin_memory=True)` at whatever peak it takes, all in one process, steps taken in turn so that all meet the
same machine. Every row tells the step time, the measured and the predicted peak, how much went to the host, and whether
the gradients are the same bits as plain eager's. `--trace FILE` writes a Chrome trace of one offloaded step, in which
the copies lie beside the kernels.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.frontier.models import build
from benchmarks.frontier.workloads import Workload
from benchmarks.runs import save_results
from torch.autograd.graph import save_on_cpu

import remat
from remat.core.budget import format_bytes
from remat.core.copies import copies_of
from remat.core.engines import follow_copies

Step = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Row:
    model: str
    way: str
    budget: str
    step_ms: float
    peak_bytes: int
    predicted_bytes: int | None
    predicted_ms: float | None
    overhead: float | None
    gap: float | None
    copies: int
    host_bytes: int
    waited_ms: float
    same_bits: bool | None
    plan_s: float


@dataclass(slots=True)
class Contender:
    way: str
    budget: str
    step: Step
    plan: remat.Plan | None
    plan_s: float
    times_s: list[float]


def training_step(workload: Workload, model: Callable[..., Any], *, on_host: bool = False) -> Step:
    device = workload.inputs.device.type

    def step() -> torch.Tensor:
        with (
            torch.autocast(device, torch.bfloat16),
            save_on_cpu(pin_memory=device == "cuda") if on_host else nullcontext(),
        ):
            loss: torch.Tensor = model(workload.inputs, workload.labels)
        loss.backward()
        return loss.detach()

    return step


def contenders(workload: Workload, budgets: Sequence[str], compiler: str | None, limit_s: float) -> list[Contender]:
    found = []
    for budget in budgets:
        for offload in (None, "cpu"):
            model = remat.optimize(workload.model, budget, offload=offload, compiler=compiler, time_limit=limit_s)
            step = training_step(workload, model)
            began = time.perf_counter()
            try:
                for _ in range(3):
                    step()
                    workload.model.zero_grad(set_to_none=True)
            except remat.InfeasibleBudget as error:
                print(f"{budget}, offload={offload}: {error}", flush=True)
                continue
            way = "remat, offload" if offload else "remat"
            taken = time.perf_counter() - began
            found.append(Contender(way, budget, step, remat.plan_of(model), taken, []))
    return found


def run(name: str, budgets: Sequence[str], compiler: str | None, steps: int, device: str, limit_s: float) -> list[Row]:
    workload = build(name, device)
    plain = torch.compile(workload.model) if compiler else workload.model
    entrants = [Contender("plain", "", training_step(workload, plain), None, 0.0, [])]
    if not compiler:
        entrants.append(Contender("save_on_cpu", "", training_step(workload, plain, on_host=True), None, 0.0, []))
    entrants += contenders(workload, budgets, compiler, limit_s)
    for entrant in entrants:
        entrant.step()
        workload.model.zero_grad(set_to_none=True)
    for _ in range(steps):
        for entrant in entrants:
            entrant.times_s.append(timed(workload, entrant.step))
    expected = bits(workload, entrants[0].step)
    return [row(name, workload, entrant, None if compiler else expected) for entrant in entrants]


def timed(workload: Workload, step: Step) -> float:
    synchronize(workload)
    began = time.perf_counter()
    step()
    synchronize(workload)
    taken = time.perf_counter() - began
    workload.model.zero_grad(set_to_none=True)
    return taken


def synchronize(workload: Workload) -> None:
    if workload.inputs.device.type == "cuda":
        torch.cuda.synchronize()


def bits(workload: Workload, step: Step) -> list[torch.Tensor]:
    workload.model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    found = [step().cpu()]
    found += [item.grad.cpu() for item in workload.model.parameters() if item.grad is not None]
    workload.model.zero_grad(set_to_none=True)
    return found


def peak_of(workload: Workload, step: Step) -> int:
    if workload.inputs.device.type != "cuda":
        return remat.measure(step).peak_bytes
    synchronize(workload)
    torch.cuda.reset_peak_memory_stats()
    step()
    synchronize(workload)
    workload.model.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated()


def row(name: str, workload: Workload, entrant: Contender, expected: list[torch.Tensor] | None) -> Row:
    plan = entrant.plan
    engines = follow_copies(plan.problem, plan.schedule) if plan is not None and plan.schedule is not None else None
    peak = peak_of(workload, entrant.step)
    same = all(map(torch.equal, expected, bits(workload, entrant.step))) if expected is not None else None
    return Row(
        model=name,
        way=entrant.way,
        budget=entrant.budget,
        step_ms=statistics.median(entrant.times_s) * 1e3,
        peak_bytes=peak,
        predicted_bytes=plan.predicted_peak if plan is not None else None,
        predicted_ms=plan.predicted_time / 1e6 if plan is not None else None,
        overhead=plan.overhead if plan is not None else None,
        gap=plan.gap if plan is not None else None,
        copies=len(copies_of(plan.problem.graph)) if plan is not None else 0,
        host_bytes=engines.host_peak_bytes if engines is not None else 0,
        waited_ms=engines.waited_ns / 1e6 if engines is not None else 0.0,
        same_bits=same,
        plan_s=entrant.plan_s,
    )


def show(rows: Sequence[Row]) -> None:
    head = f"{'model':14} {'way':15} {'budget':>8} {'step ms':>9} {'expected':>9} {'peak':>10} {'predicted':>10} "
    print(f"{head}{'gap':>6} {'copies':>6} {'on host':>10} {'waits ms':>8} {'plan s':>6} bits")
    for item in rows:
        expected = f"{item.predicted_ms:.1f}" if item.predicted_ms is not None else ""
        predicted = format_bytes(item.predicted_bytes) if item.predicted_bytes is not None else ""
        gap = f"{item.gap:.1%}" if item.gap is not None else ""
        same = {True: "same", False: "DIFFER", None: ""}[item.same_bits]
        print(
            f"{item.model:14} {item.way:15} {item.budget:>8} {item.step_ms:9.1f} {expected:>9} "
            f"{format_bytes(item.peak_bytes):>10} {predicted:>10} {gap:>6} {item.copies:6} "
            f"{format_bytes(item.host_bytes):>10} {item.waited_ms:8.1f} {item.plan_s:6.0f} {same}",
            flush=True,
        )


def write_trace(name: str, budget: str, device: str, limit_s: float, path: Path) -> None:
    workload = build(name, device)
    found = [item for item in contenders(workload, [budget], None, limit_s) if item.way == "remat, offload"]
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if device == "cuda" else []
    with torch.profiler.profile(activities=activities) as profiler:
        found[0].step()
        synchronize(workload)
    profiler.export_chrome_trace(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["gpt2-medium"])
    parser.add_argument("--budgets", nargs="*", default=["0.3x"], help="of eager steps")
    parser.add_argument("--compiled", nargs="*", default=[], help="budgets of compiled steps")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--time-limit", type=float, default=20.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    rows: list[Row] = []
    for name in asked.models:
        for budgets, compiler in ((asked.budgets, None), (asked.compiled, "inductor")):
            if budgets:
                rows += run(name, budgets, compiler, asked.steps, asked.device, asked.time_limit)
                torch.compiler.reset()
                show(rows)
    if asked.trace is not None:
        write_trace(asked.models[0], asked.budgets[0], asked.device, asked.time_limit, asked.trace)
    if asked.output is not None:
        device = torch.cuda.get_device_name() if asked.device == "cuda" else ""
        save_results(asked.output, [asdict(item) for item in rows], device)


if __name__ == "__main__":
    main()
