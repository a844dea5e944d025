"""Making it fit, checked: memory in order on real ranks, how fast `remat fit` answers, and the textbook ladder.

    python -m benchmarks.bench_fit order      12 combinations on two gloo ranks of this CPU, predicted and measured
    python -m benchmarks.bench_fit timing     `remat fit` for 8 GPUs, and for a 70-billion Llama on 64
    python -m benchmarks.bench_fit ladder     the rungs of a GPT of 1.3 billion parameters, predicted
    python -m benchmarks.bench_fit device     on one GPU: those rungs of one device measured within --memory, then the
                                              largest GPT by layers that trains within --cap, confirmed by real steps

Without a word, `order`. Each prints tables and writes results/fit_*.json.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import resource
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.fit_ranks import measured_peaks

from remat import zoo
from remat.core.budget import format_bytes, parse_budget
from remat.fit.apply import make_optimizer_of, set_up
from remat.fit.cluster import Cluster, find_cluster
from remat.fit.found import fit
from remat.fit.grow import grow
from remat.fit.ladder import climb, ladder_sheet, measure_levers
from remat.fit.levers import Levers, OptimizerKind, Precision, Recomputation, Zero
from remat.fit.outcomes import Evaluator, Traces
from remat.fit.search import DEFAULT_ALLOWED, LeverSearch
from remat.pytorch.estimate.building_fakes import builds_fakes
from remat.report.tables.fit import fit_sheet
from remat.zoo import Example

RESULTS = Path(__file__).parent / "results"
TEXTBOOK: dict[str, Any] = dict(depth=24, width=2048, heads=32, length=1024, vocabulary=50257, dropout=0.0)
SMALL: dict[str, Any] = dict(width=128, depth=6, heads=4, length=32, vocabulary=256, dropout=0.0)
APART = 1.05
"""Pairs whose measured peaks differ by more must be in the predicted order."""


def combinations(ranks: int, micro_batch: int) -> list[Levers]:
    """Twelve that differ in every lever that a CPU can pull."""
    plain = Levers(world=ranks, micro_batch=micro_batch)
    blocks = Recomputation.PER_BLOCK
    return [
        plain,
        replace(plain, precision=Precision.BF16),
        replace(plain, recomputation=blocks),
        replace(plain, optimizer=OptimizerKind.SGD, accumulation=2),
        replace(plain, zero=Zero.OPTIMIZER),
        replace(plain, zero=Zero.OPTIMIZER, precision=Precision.BF16, recomputation=blocks),
        replace(plain, zero=Zero.GRADIENTS),
        replace(plain, zero=Zero.GRADIENTS, recomputation=blocks),
        replace(plain, zero=Zero.WEIGHTS),
        replace(plain, zero=Zero.WEIGHTS, precision=Precision.BF16),
        replace(plain, zero=Zero.WEIGHTS, recomputation=blocks),
        replace(plain, zero=Zero.WEIGHTS, precision=Precision.PURE_BF16, recomputation=blocks),
    ]


def order(ranks: int = 2, micro_batch: int = 8) -> dict[str, Any]:
    chosen = combinations(ranks, micro_batch)
    example = zoo.build("gpt", **SMALL, batch=micro_batch)
    evaluator = Evaluator(Traces(example.model, example.args, example.kwargs, None), find_cluster("cpu", ranks))
    predicted = [evaluator.at_once(levers).peak_bytes for levers in chosen]
    measured = measured_peaks("gpt", SMALL, chosen, ranks)
    for levers, ours, real in zip(chosen, predicted, measured, strict=True):
        print(f"{levers.label:60} {format_bytes(ours):>12} {format_bytes(real):>12} {ours / real - 1:+.2%}")
    pairs = [
        (left, right)
        for left, right in itertools.combinations(range(len(chosen)), 2)
        if max(measured[left], measured[right]) > APART * min(measured[left], measured[right])
    ]
    wrong = [
        (chosen[left].label, chosen[right].label)
        for left, right in pairs
        if (predicted[left] < predicted[right]) != (measured[left] < measured[right])
    ]
    print(f"{len(pairs)} pairs differ by more than 5 %; {len(wrong)} are predicted in another order: {wrong}")
    labels = [levers.label for levers in chosen]
    return {"labels": labels, "predicted": predicted, "measured": measured, "pairs": len(pairs), "wrong": wrong}


def timing() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, sizes, gpus, batch in (("gpt", TEXTBOOK, 8, 256), ("llama-70b", {}, 64, 1024)):
        began, cpu = time.perf_counter(), time.process_time()
        with builds_fakes():
            example = zoo.build(name, **sizes)
        made = fit(example.model, *example.args, gpu="H100-80GB", gpus=gpus, batch=batch, **example.kwargs)
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(made.table())
        print(made.explain())
        print(
            f"{name} on {gpus}: {took:.1f} s ({cpu:.1f} s of one core), {format_bytes(peak)} of this machine's memory"
        )
        found[name] = {"seconds": took, "cpu_seconds": cpu, "memory_bytes": peak, "best": made.levers.label}
    return found


def textbook(gpu: str, memory: int | None) -> tuple[Evaluator, int]:
    with builds_fakes():
        example = zoo.build("gpt", **TEXTBOOK, batch=16)
    cluster = find_cluster(gpu, 1, memory_bytes=memory)
    return Evaluator(Traces(example.model, example.args, example.kwargs, gpu), cluster, time_limit_s=10.0), 16


def ladder(gpu: str, memory: int | None) -> dict[str, Any]:
    began = time.perf_counter()
    evaluator, micro = textbook(gpu, memory)
    rungs = list(climb(evaluator, micro))
    sheet = ladder_sheet("a GPT of 1.3 billion parameters", evaluator, rungs, began)
    print(fit_sheet(sheet).as_markdown())
    print("\n".join(sheet.sentences))
    return asdict(sheet)


def device(gpu: str, memory: int | None, cap: int, host: int) -> dict[str, Any]:
    """Everything that one GPU can show, in one call."""
    if not torch.cuda.is_available():
        raise SystemExit("`device` needs a GPU; run `ladder` for what is predicted.")
    return {"rungs": measured_rungs(gpu, memory), "largest": largest_gpt(gpu, cap, host)}


def measured_rungs(gpu: str, memory: int | None) -> list[dict[str, Any]]:
    limit_memory(memory)
    evaluator, micro = textbook(gpu, memory)
    example = zoo.build("gpt", **TEXTBOOK, batch=micro, device="cuda")
    rows = []
    for rung in climb(evaluator, micro):
        row: dict[str, Any] = {"name": rung.name, "predicted_bytes": rung.outcome.peak_bytes}
        row |= {"predicted_s": rung.outcome.time.total_s, "label": rung.outcome.levers.label}
        if rung.outcome.levers.world == 1:
            try:
                row["measured_bytes"], row["measured_s"] = measure_levers(example, rung.outcome.levers)
            except torch.OutOfMemoryError as error:
                row["died"] = str(error).splitlines()[0]
        gc.collect()
        torch.cuda.empty_cache()
        print(json.dumps(row), flush=True)
        rows.append(row)
    del example
    limit_memory(None)
    return rows


def largest_gpt(gpu: str, cap: int, host: int) -> dict[str, Any]:
    """By layers, with AdamW: plainly in fp32, and with every lever; both confirmed by steps that really run."""
    sizes = {**TEXTBOOK, "depth": 6}
    with builds_fakes():
        example = zoo.build("gpt", **sizes, batch=1)
    cluster = find_cluster(gpu, 1, memory_bytes=cap)
    traces = Traces(example.model, example.args, example.kwargs, gpu)
    found: dict[str, Any] = {}
    for name, allowed in (("plain", frozenset[str]()), ("every lever", DEFAULT_ALLOWED)):
        found[name] = _grown(name, traces, cluster, allowed, host)
        found[name]["confirmed"] = confirm(found[name], cap)
        print(json.dumps(found[name], default=str), flush=True)
    found["ratio"] = found["every lever"]["parameters"] / found["plain"]["parameters"]
    print(f"{found['ratio']:.2f} times the parameters of plain fp32")
    return found


def _grown(name: str, traces: Traces, cluster: Cluster, allowed: frozenset[str], host: int) -> dict[str, Any]:
    def at(size: int) -> LeverSearch:
        return LeverSearch(Evaluator(traces, cluster, layers=size), OptimizerKind.ADAMW, allowed, batch=1)

    def fits_host(size: int) -> bool:
        evaluator = at(size).evaluator
        levers = Levers(precision=Precision.PURE_BF16, offloads_optimizer=True)
        return evaluator.optimistic(levers).state.host <= host

    if name == "plain":
        size = 1
        while at(size + 1).evaluator.at_once(Levers()).fits:
            size += 1
        outcome = at(size).evaluator.at_once(Levers())
    else:
        grown = grow("layers", at, 24)
        assert grown is not None, "a GPT of one layer fits"
        size, outcome = grown.size, grown.outcome
        while not fits_host(size):
            size -= 1
            outcome = at(size).evaluator.at_once(
                replace(outcome.levers, recomputation=Recomputation.PER_BLOCK, budget_bytes=None)
            )
    count = sum(item.count for item in traces.of(outcome.levers, size).parameters)
    return {"layers": size, "parameters": count, "predicted_bytes": outcome.peak_bytes, "levers": outcome.levers}


def confirm(row: dict[str, Any], cap: int) -> dict[str, Any]:
    """Real steps of the predicted size, within the cap."""
    limit_memory(cap)
    low = torch.bfloat16 if row["levers"].precision is Precision.PURE_BF16 else torch.float32
    example = build_on_gpu(row["layers"], low)
    torch.cuda.reset_peak_memory_stats()
    try:
        made = set_up(example.model, make_optimizer_of(row["levers"].optimizer, example.model), row["levers"])
        seconds = []
        for _ in range(3):
            torch.cuda.synchronize()
            began = time.perf_counter()
            made.train_step(*example.args)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated()
        result = {"peak_bytes": peak, "seconds": min(seconds), "tokens_per_s": TEXTBOOK["length"] / min(seconds)}
        del made
    except torch.OutOfMemoryError as error:
        result = {"died": str(error).splitlines()[0]}
    del example
    gc.collect()
    torch.cuda.empty_cache()
    limit_memory(None)
    return result


def build_on_gpu(layers: int, dtype: torch.dtype) -> Example:
    """Weights are drawn where they will lie, so that a large model does not pass through the host."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            return zoo.build("gpt", **{**TEXTBOOK, "depth": layers}, batch=1)
    finally:
        torch.set_default_dtype(before)


def limit_memory(cap: int | None) -> None:
    """As much of the GPU as a smaller one has; None is all of it."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if cap is None else min(1.0, cap / total))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="order", choices=("order", "timing", "ladder", "device"))
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--memory", help="what of the GPU the ladder may use, as 80GiB")
    parser.add_argument("--cap", default="24GiB", help="what of it the largest GPT may use")
    parser.add_argument("--host", default="100GiB", help="what of the host's memory the optimizer may use")
    asked = parser.parse_args()
    sizes = {key: int(parse_budget(text).amount) for key, text in vars(asked).items() if key in ("cap", "host")}
    memory = None if asked.memory is None else int(parse_budget(asked.memory).amount)
    if asked.what == "order":
        found: Any = order()
    elif asked.what == "timing":
        found = timing()
    elif asked.what == "ladder":
        found = ladder(asked.gpu, memory)
    else:
        found = device(asked.gpu, memory, **sizes)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"fit_{asked.what}.json").write_text(json.dumps(found, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
