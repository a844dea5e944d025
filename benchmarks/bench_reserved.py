"""What a planned step with eager kernels reserves on a CUDA device: by itself, and with the allocator held to its plan.

    python -m benchmarks.bench_reserved --model gpt2-medium --budgets 20 12

Plain eager's and the planned step's own reserved memory stand beside; times are medians of the same process.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.frontier.models import MODELS, build
from benchmarks.frontier.workloads import Workload
from benchmarks.runs import save_results

import remat

GIB = 2**30


def measured(run: Callable[..., Any], workload: Workload, steps: int) -> dict[str, float]:
    """Peaks in bytes and the median time of a step in ms."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times = [_timed(run, workload) for _ in range(steps)]
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "step_ms": statistics.median(times[len(times) // 3 :]),
    }


def _timed(run: Callable[..., Any], workload: Workload) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.autocast("cuda", torch.bfloat16):
        loss = run(workload.inputs, workload.labels)
    loss.backward()
    workload.model.zero_grad(set_to_none=True)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="gpt2-medium")
    parser.add_argument("--budgets", nargs="+", default=["20", "12"], help="GiB")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--without-eager", action="store_true", help="plain eager may not fit")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "reserved_cuda.json")
    options = parser.parse_args()
    workload = build(options.model, "cuda")
    rows: list[dict[str, Any]] = []
    print("| step | predicted GiB | peak GiB | reserved GiB | reserved / predicted | step ms |")
    print("|---|---:|---:|---:|---:|---:|")
    if not options.without_eager:
        _tell(rows, "plain eager", None, measured(workload.model, workload, options.steps))
    for budget in options.budgets:
        run = remat.optimize(workload.model, f"{budget} GiB", progress=False)
        for _ in range(2):
            _timed(run, workload)
        predicted = remat.plan_of(run).predicted_peak
        _tell(rows, f"planned, {budget} GiB", predicted, measured(run, workload, options.steps))
        with remat.capped(run):
            _tell(rows, f"planned, {budget} GiB, capped", predicted, measured(run, workload, options.steps))
        del run
    facts = {"model": options.model, "device": torch.cuda.get_device_name(), "torch_version": torch.__version__}
    save_results(options.output, {**facts, "rows": rows})


def _tell(rows: list[dict[str, Any]], name: str, predicted: int | None, found: dict[str, float]) -> None:
    rows.append({"step": name, "predicted_bytes": predicted, **found})
    ratio = "" if predicted is None else f"{found['reserved_bytes'] / predicted:.4f}"
    sizes = [None if predicted is None else predicted / GIB, found["peak_bytes"] / GIB, found["reserved_bytes"] / GIB]
    shown = ["" if size is None else f"{size:.2f}" for size in sizes]
    print(f"| {name} | {' | '.join(shown)} | {ratio} | {found['step_ms']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
