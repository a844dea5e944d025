"""Steps of many lengths: what planning for new shapes costs, and whether every step keeps its budget and its bits.

    python -m benchmarks.bench_shapes [--device cuda] [--compiled] [--steps 500] [--lengths 40] [--budget 0.5x]
                                      [--ways plain,remat,fixed,peer] [--minutes 8] [--output FOLDER]

One GPT is trained on batches whose lengths are drawn from 64 to 1,024, in the same order by each way: plain PyTorch;
Remat, which leaves lengths open; `fixed`, Remat as it plans every length for itself; and as a peer torch.compile with
dynamic shapes and checkpointing per block. A way that runs out of its share of the minutes is stopped, and says how far
it came. A stall is by how much a step takes longer than the median of its length's steps from its third on; steps in
which nothing was captured or planned are none. On CUDA every step's peak is read; on CPU, where that takes a profiler,
each length is run twice more in a second training that is watched.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks.runs import save_results
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import remat
from remat.core.budget import format_bytes
from remat.pytorch.device import device_name
from remat.pytorch.measure.measure_step import measure_once
from remat.pytorch.run.optimize import session_of

SHORTEST, LONGEST = 64, 1024
WARM_UP = 20
SIZES = {
    "cpu": {"width": 128, "depth": 4, "heads": 4, "words": 1000},
    "cuda": {"width": 768, "depth": 12, "heads": 12, "words": 50257},
}
BATCH = {"cpu": 2, "cuda": 8}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Writer(nn.Module):
    """A GPT that returns its loss."""

    def __init__(self, width: int, depth: int, heads: int, words: int, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(LONGEST, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.checkpointed = checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits = self.head(self.last(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(slots=True)
class Trained:
    """What one way did."""

    way: str
    steps: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    planned: list[bool] = field(default_factory=list)
    """Whether something was captured, planned or replaced in the step."""
    peaks: dict[int, int] = field(default_factory=dict)
    """The largest measured, by length."""
    budget_bytes: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Loop:
    device: torch.device
    lengths: list[int]
    words: int
    batch: int

    def batches(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(0, self.words, (self.batch, length), generator=generator) for length in self.lengths]

    def train(
        self, way: str, step: Callable[..., Any], model: nn.Module, until: float, state: Callable[[], Any]
    ) -> Trained:
        """Every batch once, or until the time is up."""
        done = Trained(way)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.device.type == "cuda")
        before = state()
        for length, batch in zip(self.lengths, self.batches(), strict=True):
            if time.perf_counter() > until:
                done.note = f"stopped after {done.steps} steps: its time was up"
                break
            tokens = batch.to(self.device)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            loss = step(tokens)
            loss.backward()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
                done.peaks[length] = max(done.peaks.get(length, 0), torch.cuda.max_memory_allocated())
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            done.losses.append(float(loss))
            done.seconds.append(time.perf_counter() - start)
            after = state()
            done.planned.append(after != before)
            before = after
            done.steps += 1
        return done


def stalls(trained: Trained, lengths: list[int]) -> list[float]:
    """For each step, what planning added to it."""
    settled: dict[int, list[float]] = {}
    seen: dict[int, int] = {}
    for length, seconds, planned in zip(lengths, trained.seconds, trained.planned, strict=False):
        seen[length] = seen.get(length, 0) + 1
        if seen[length] > 2 and not planned:
            settled.setdefault(length, []).append(seconds)
    usual = {length: statistics.median(found) for length, found in settled.items()}
    rate = statistics.median(seconds / length for length, seconds in usual.items()) if usual else 0.0
    return [
        max(0.0, seconds - usual.get(length, rate * length)) if planned else 0.0
        for length, seconds, planned in zip(lengths, trained.seconds, trained.planned, strict=False)
    ]


def state_of(step: Any) -> tuple[Any, ...]:
    session = session_of(step)
    return len(session.graphs), *map(id, getattr(session, "planned", ())), id(session.plan)


def run_way(way: str, loop: Loop, model: nn.Module, options: argparse.Namespace, until: float) -> Trained:
    model = copy.deepcopy(model)
    if way == "plain":
        return loop.train(way, model, model, until, lambda: None)
    if way == "peer":
        for block in [model]:
            block.checkpointed = True
        compiled = torch.compile(model, dynamic=True)
        trained = loop.train(way, compiled, model, until, lambda: None)
        trained.planned = [number < 3 or seconds > 5 for number, seconds in enumerate(trained.seconds)]
        return trained
    dynamic = {"length": (SHORTEST, LONGEST)} if way == "remat" else False
    compiler = "inductor" if options.compiled else None
    step = remat.optimize(
        model, options.budget, dynamic=dynamic, compiler=compiler, progress=False, time_limit=options.time_limit
    )
    trained = loop.train(way, step, model, until, lambda: state_of(step))
    plan = remat.plan_of(step)
    trained.budget_bytes = plan.budget_bytes
    trained.note = trained.note or session_of(step).fixed_because
    return trained


def watch_peaks(trained: Trained, loop: Loop, model: nn.Module, options: argparse.Namespace) -> None:
    """On CPU: each length twice in a training of its own, every step watched."""
    model = copy.deepcopy(model)
    step = remat.optimize(
        model, options.budget, dynamic={"length": (SHORTEST, LONGEST)}, progress=False, time_limit=options.time_limit
    )
    by_length = dict(zip(loop.lengths, loop.batches(), strict=True))
    first = True
    for length in (*by_length, *by_length):
        measured = measure_once(step, by_length[length])
        if not first:
            # The first call captures, which is no part of a step.
            trained.peaks[length] = max(trained.peaks.get(length, 0), measured.peak_bytes)
        first = False
        model.zero_grad(set_to_none=True)
    trained.budget_bytes = max(trained.budget_bytes, remat.plan_of(step).budget_bytes)


def told(trained: Trained, lengths: list[int], plain: Trained | None) -> dict[str, Any]:
    """One row of the table."""
    stalled = stalls(trained, lengths)
    late, total = sum(stalled[WARM_UP:]), sum(trained.seconds[WARM_UP:])
    over = [length for length, peak in trained.peaks.items() if trained.budget_bytes and peak > trained.budget_bytes]
    equal = plain is not None and trained.losses == plain.losses[: len(trained.losses)]
    row = {
        "way": trained.way,
        "steps": trained.steps,
        "seconds": round(sum(trained.seconds), 1),
        "stalls_s": round(sum(stalled), 1),
        "stalls_after_warm_up_s": round(late, 2),
        "share_after_warm_up": round(late / total, 4) if total else 0.0,
        "peak": format_bytes(max(trained.peaks.values())) if trained.peaks else "",
        "budget": format_bytes(trained.budget_bytes) if trained.budget_bytes else "",
        "lengths_over_budget": over,
        "losses_equal_plain": equal,
        "note": trained.note,
    }
    print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lengths", type=int, default=40)
    parser.add_argument("--budget", default="0.5x")
    parser.add_argument("--time-limit", type=float, default=10.0)
    parser.add_argument("--ways", default="plain,remat,fixed,peer")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    device = torch.device(options.device)
    choice = random.Random(0)
    kinds = choice.sample(range(SHORTEST, LONGEST + 1), options.lengths)
    lengths = [choice.choice(kinds) for _ in range(options.steps)]
    torch.manual_seed(0)
    sizes = SIZES[device.type]
    model = Writer(**sizes).to(device)
    loop = Loop(device, lengths, sizes["words"], BATCH[device.type])
    ways = options.ways.split(",")
    until, rows, plain = time.perf_counter() + 60 * options.minutes, [], None
    for number, way in enumerate(ways):
        left = until - time.perf_counter()
        trained = run_way(way, loop, model, options, time.perf_counter() + left / (len(ways) - number))
        if way == "plain":
            plain = trained
        if way == "remat":
            # The same bytes for every way: a share is of the largest shape, which the others do not know ahead.
            options.budget = trained.budget_bytes
        if way == "remat" and device.type == "cpu":
            watch_peaks(trained, loop, model, options)
        rows.append({**told(trained, lengths, plain), "run": asdict(trained)})
        if device.type == "cuda":
            torch.cuda.empty_cache()
        torch.compiler.reset()
    if options.output:
        name = "shapes" + ("-compiled" if options.compiled else "") + f"-{device.type}.json"
        save_results(options.output / name, rows, device_name(device) if device.type == "cuda" else "")


if __name__ == "__main__":
    main()
