"""Making it fit, checked: memory in order on real ranks, how fast `remat fit` answers, and the textbook ladder.

    python -m benchmarks.bench_fit order      12 combinations on two gloo ranks of this CPU, predicted and measured
    python -m benchmarks.bench_fit timing     `remat fit` for 8 GPUs, and for a 70-billion Llama on 64
    python -m benchmarks.bench_fit ladder     the rungs of a GPT of 1.3 billion parameters, predicted
    python -m benchmarks.bench_fit largest    the largest GPT by layers that trains within --cap, predicted
    python -m benchmarks.bench_fit device     on one GPU: the largest GPT confirmed by real steps, then those rungs of
                                              one device measured within --memory

Without a word, `order`. Each prints tables and writes results/fit_*.json; `device` writes its file anew after each row,
and begins nothing more when --limit-s is over.
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
from benchmarks.runs import save_results

from remat import zoo
from remat.core.budget import format_bytes, parse_budget
from remat.core.search.largest import largest
from remat.distributed.pretended import blocks_of
from remat.fit.apply import SetUp, make_optimizer_of, set_up
from remat.fit.cluster import Cluster, find_cluster
from remat.fit.found import fit
from remat.fit.grow import grow
from remat.fit.ladder import climb, ladder_sheet, measure_levers
from remat.fit.levers import Levers, OptimizerKind, Precision, Recomputation, Zero
from remat.fit.outcomes import Evaluator, Traces
from remat.fit.search import DEFAULT_ALLOWED, LeverSearch
from remat.pytorch.estimate.building_fakes import builds_fakes
from remat.pytorch.explore.module_blocks import checkpoint_blocks
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


class Rows:
    """What is known so far, printed and saved whenever it grows, and how much time is left."""

    def __init__(self, path: Path, limit_s: float, on: str) -> None:
        self._path, self._on, self._end = path, on, time.monotonic() + limit_s
        self.found: dict[str, Any] = {}

    def add(self, name: str, row: Any) -> None:
        self.found[name] = row
        print(f"{name}: {json.dumps(row, default=str)}", flush=True)
        save_results(self._path, json.loads(json.dumps(self.found, default=str)), self._on)

    def is_over(self, what: str) -> bool:
        if time.monotonic() < self._end:
            return False
        self.add(what, {"not reached": "the time was over"})
        return True


def device(gpu: str, memory: int | None, cap: int, host: int, rows: Rows) -> dict[str, Any]:
    """Everything that one GPU can show, in one call."""
    if not torch.cuda.is_available():
        raise SystemExit("`device` needs a GPU; run `ladder` and `largest` for what is predicted.")
    confirm_largest(gpu, cap, host, rows)
    measure_rungs(gpu, memory, rows)
    return rows.found


def measure_rungs(gpu: str, memory: int | None, rows: Rows) -> None:
    if rows.is_over("rungs"):
        return
    evaluator, micro = textbook(gpu, memory)
    for rung in climb(evaluator, micro):
        row: dict[str, Any] = {"predicted_bytes": rung.outcome.peak_bytes}
        row |= {"predicted_s": rung.outcome.time.total_s, "label": rung.outcome.levers.label}
        if rung.outcome.levers.world == 1 and not rows.is_over(rung.name):
            began = time.perf_counter()
            row |= _measured(micro, rung.outcome.levers, memory)
            row["took_s"] = time.perf_counter() - began
        rows.add(rung.name, {**rows.found.get(rung.name, {}), **row})


def _measured(micro: int, levers: Levers, memory: int | None) -> dict[str, Any]:
    limit_memory(memory)
    try:
        peak, seconds = measure_levers(textbook_on_gpu(micro), levers)
        return {"measured_bytes": peak, "measured_s": seconds}
    except torch.OutOfMemoryError as error:
        return {"died": str(error).splitlines()[0]}
    finally:
        gc.collect()
        torch.cuda.empty_cache()
        limit_memory(None)


def textbook_on_gpu(micro: int) -> Example:
    with torch.device("cuda"):
        return zoo.build("gpt", **TEXTBOOK, batch=micro)


def largest_gpt(gpu: str, cap: int, host: int) -> dict[str, Any]:
    """By layers, with AdamW: plainly in fp32, and with every lever."""
    sizes = {**TEXTBOOK, "depth": 6}
    with builds_fakes():
        example = zoo.build("gpt", **sizes, batch=1)
    cluster = find_cluster(gpu, 1, memory_bytes=cap)
    traces = Traces(example.model, example.args, example.kwargs, gpu)
    found: dict[str, Any] = {}
    for name, allowed in (("plain", frozenset[str]()), ("every lever", DEFAULT_ALLOWED)):
        found[name] = _grown(name, traces, cluster, allowed, host)
    found["ratio"] = found["every lever"]["parameters"] / found["plain"]["parameters"]
    return found


def confirm_largest(gpu: str, cap: int, host: int, rows: Rows) -> None:
    """Real steps of what is predicted, of one layer more, and of what a person would write."""
    predicted = largest_gpt(gpu, cap, host)
    rows.add("ratio", predicted["ratio"])
    for name in ("plain", "every lever"):
        rows.add(name, predicted[name])
        if not rows.is_over(f"{name}, steps"):
            rows.add(f"{name}, steps", confirm(predicted[name], cap))
    larger = {**predicted["plain"], "layers": predicted["plain"]["layers"] + 1}
    if not rows.is_over("plain, one layer more"):
        rows.add("plain, one layer more", confirm(larger, cap))
    if not rows.is_over("by hand"):
        rows.add("by hand", by_hand(min(predicted["every lever"]["layers"], hand_layers(host)), cap))


def _grown(name: str, traces: Traces, cluster: Cluster, allowed: frozenset[str], host: int) -> dict[str, Any]:
    def at(size: int) -> LeverSearch:
        return LeverSearch(Evaluator(traces, cluster, layers=size), OptimizerKind.ADAMW, allowed, batch=1)

    def fits_host(size: int) -> bool:
        evaluator = at(size).evaluator
        levers = Levers(precision=Precision.PURE_BF16, offloads_optimizer=True)
        return evaluator.optimistic(levers).state.host <= host

    def fits_plainly(size: int) -> bool:
        return at(size).evaluator.at_once(Levers()).fits

    if name == "plain":
        size = largest(fits_plainly, 24, 1)
        outcome = at(size).evaluator.at_once(Levers())
    else:
        grown = grow("layers", at, 96)
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
    try:
        made = set_up(example.model, make_optimizer_of(row["levers"].optimizer, example.model), row["levers"])
        result = timed_steps(made, example.args)
        del made
    except torch.OutOfMemoryError as error:
        result = {"died": str(error).splitlines()[0]}
    del example
    gc.collect()
    torch.cuda.empty_cache()
    limit_memory(None)
    return result


def hand_layers(host: int) -> int:
    """Layers whose fp32 weights, gradients and moments the host has room for."""
    return int(host / (16 * 12 * TEXTBOOK["width"] ** 2))


def by_hand(layers: int, cap: int) -> dict[str, Any]:
    """What a person would write: bf16, checkpointing per block, fully_shard with CPUOffloadPolicy on one rank."""
    from torch import distributed
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    limit_memory(cap)
    distributed.init_process_group("cpu:gloo,cuda:nccl", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        example = zoo.build("gpt", **{**TEXTBOOK, "depth": layers}, batch=1)
        checkpoint_blocks(example.model)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        mesh = distributed.device_mesh.init_device_mesh("cuda", (1,))
        for block in (*blocks_of(example.model), example.model):
            distributed.fsdp.fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=CPUOffloadPolicy())
        made = SetUp(
            example.model,
            torch.optim.AdamW(example.model.parameters(), lr=1e-4, fused=True),
            None,
            Levers(),
            torch.device("cuda"),
        )
        args = tuple(item.cuda() for item in example.args)
        return {"layers": layers, **timed_steps(made, args)}
    except (torch.OutOfMemoryError, RuntimeError) as error:
        return {"layers": layers, "died": str(error).splitlines()[0]}
    finally:
        distributed.destroy_process_group()
        limit_memory(None)


def timed_steps(made: SetUp, args: tuple[Any, ...], count: int = 3) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        made.train_step(*args)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    tokens = TEXTBOOK["length"] / min(seconds)
    return {"peak_bytes": torch.cuda.max_memory_allocated(), "seconds": min(seconds), "tokens_per_s": tokens}


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
    parser.add_argument("what", nargs="?", default="order", choices=("order", "timing", "ladder", "largest", "device"))
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--memory", help="what of the GPU the ladder may use, as 80GiB")
    parser.add_argument("--cap", default="24GiB", help="what of it the largest GPT may use")
    parser.add_argument("--host", default="108GiB", help="what of the host's memory the optimizer may use")
    parser.add_argument("--limit-s", type=float, default=1e6, help="of `device`: nothing more begins after that")
    asked = parser.parse_args()
    sizes = {key: int(parse_budget(text).amount) for key, text in vars(asked).items() if key in ("cap", "host")}
    memory = None if asked.memory is None else int(parse_budget(asked.memory).amount)
    if asked.what == "order":
        found: Any = order()
    elif asked.what == "timing":
        found = timing()
    elif asked.what == "ladder":
        found = ladder(asked.gpu, memory)
    elif asked.what == "largest":
        found = largest_gpt(asked.gpu, **sizes)
        print(json.dumps(found, indent=1, default=str))
    else:
        on = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        device(asked.gpu, memory, **sizes, rows=Rows(RESULTS / "fit_device.json", asked.limit_s, on))
        return
    save_results(RESULTS / f"fit_{asked.what}.json", json.loads(json.dumps(found, default=str)))


if __name__ == "__main__":
    main()
