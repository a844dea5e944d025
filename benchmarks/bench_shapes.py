"""Steps of many lengths: what planning for new shapes costs, and whether every step keeps its budget and its bits.

    python -m benchmarks.bench_shapes [--device cuda] [--compiled] [--steps 500] [--lengths 40] [--budget 0.5x]
                                      [--ways plain,remat,fixed,peer] [--minutes 8] [--output FOLDER]

One GPT is trained on batches whose lengths are drawn from 64 to 1,024, in the same order by each way: plain PyTorch;
Remat, which leaves lengths open; `fixed`, Remat as it plans every length for itself; and as a peer torch.compile with
dynamic shapes and checkpointing per block. A way that runs out of its share of the minutes is stopped, wherever it is,
and says how far it came; one that fails is told, and the next one runs. With --output a way's row is written as soon as
it is known, and every `SAVE_S` seconds what there is of it: a run that is killed leaves what it had. A stall is by how
much a step takes longer than the median of its length's steps from its third on; steps in which nothing was captured or
planned are none. On CUDA every step's peak is read; on CPU, where that takes a profiler, each length is run twice more
in a second training that is watched.
"""

from __future__ import annotations

import argparse
import copy
import random
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
SAVE_S = 20.0
WATCHED_FROM = 0.7
"""Of a way's time on CPU, when training ends and watching begins."""
TOLD_LOSSES = 1e-3
"""By how much losses of compiled code may differ from plain ones, as a share of them."""
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


class TimeUp(BaseException):
    """No `Exception`: planning goes on after those."""


@contextmanager
def stopped_at(until: float) -> Iterator[None]:
    """End what runs in here when its time is up, also in the middle of a capture or a compilation."""

    def stop(*_: Any) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(0.1, until - time.perf_counter()))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True, slots=True)
class Loop:
    device: torch.device
    lengths: list[int]
    words: int
    batch: int
    save: Callable[[Trained], None]
    """Called now and then with what there is."""

    def batches(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(0, self.words, (self.batch, length), generator=generator) for length in self.lengths]

    def train(
        self, done: Trained, step: Callable[..., Any], model: nn.Module, until: float, state: Callable[[], Any]
    ) -> None:
        """Every batch once, or until the time is up."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.device.type == "cuda")
        before, saved = state(), time.perf_counter()
        try:
            with stopped_at(until):
                for length, batch in zip(self.lengths, self.batches(), strict=True):
                    self._step(done, step, optimizer, length, batch.to(self.device))
                    after = state()
                    done.planned[-1], before = after != before, after
                    if time.perf_counter() - saved > SAVE_S:
                        saved = time.perf_counter()
                        self.save(done)
        except TimeUp:
            done.note = f"stopped after {done.steps} steps: its time was up"

    def _step(
        self,
        done: Trained,
        step: Callable[..., Any],
        optimizer: torch.optim.Optimizer,
        length: int,
        tokens: torch.Tensor,
    ) -> None:
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
        done.planned.append(False)
        done.steps += 1


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
    return len(session.graphs), *map(id, getattr(session, "planned", None) or ()), id(session.plan)


def run_way(trained: Trained, loop: Loop, model: nn.Module, options: argparse.Namespace, until: float) -> None:
    way, model = trained.way, copy.deepcopy(model)
    if way == "plain":
        loop.train(trained, model, model, until, lambda: None)
    elif way == "peer":
        model.checkpointed = True
        loop.train(trained, torch.compile(model, dynamic=True), model, until, lambda: None)
        trained.planned = [number < 3 or seconds > 5 for number, seconds in enumerate(trained.seconds)]
    else:
        step = optimized(model, options, dynamic={"length": (SHORTEST, LONGEST)} if way == "remat" else False)
        loop.train(trained, step, model, until, lambda: state_of(step))
        session = session_of(step)
        trained.budget_bytes = session.plan.budget_bytes if session.plan is not None else 0
        trained.note = "; ".join(filter(None, (trained.note, session.fixed_because)))


def optimized(model: nn.Module, options: argparse.Namespace, **how: Any) -> Any:
    compiler = "inductor" if options.compiled else None
    return remat.optimize(
        model, options.budget, compiler=compiler, progress=False, time_limit=options.time_limit, **how
    )


def watch_peaks(trained: Trained, loop: Loop, model: nn.Module, options: argparse.Namespace, until: float) -> None:
    """On CPU: each length twice in a training of its own, every step watched."""
    model = copy.deepcopy(model)
    step = optimized(model, options, dynamic={"length": (SHORTEST, LONGEST)})
    by_length = dict(zip(loop.lengths, loop.batches(), strict=True))
    # The first call captures, which is no part of a step.
    step(next(iter(by_length.values()))).backward()
    try:
        with stopped_at(until):
            for length in (*by_length, *by_length):
                model.zero_grad(set_to_none=True)
                measured = measure_once(step, by_length[length])
                trained.peaks[length] = max(trained.peaks.get(length, 0), measured.peak_bytes)
    except TimeUp:
        trained.note += f" {len(trained.peaks)} of {len(by_length)} lengths were watched"
    trained.budget_bytes = max(trained.budget_bytes, remat.plan_of(step).budget_bytes)


def told(trained: Trained, lengths: list[int], plain: Trained | None) -> dict[str, Any]:
    """One row of the table."""
    stalled = stalls(trained, lengths)
    late, total = sum(stalled[WARM_UP:]), sum(trained.seconds[WARM_UP:])
    over = [length for length, peak in trained.peaks.items() if trained.budget_bytes and peak > trained.budget_bytes]
    pairs = list(zip(trained.losses, plain.losses if plain is not None else (), strict=False))
    apart = max((abs(one - other) / abs(other) for one, other in pairs), default=0.0)
    return {
        "way": trained.way,
        "steps": trained.steps,
        "seconds": round(sum(trained.seconds), 1),
        "stalls_s": round(sum(stalled), 1),
        "stalls_after_warm_up_s": round(late, 2),
        "share_after_warm_up": round(late / total, 4) if total else 0.0,
        "peak": format_bytes(max(trained.peaks.values())) if trained.peaks else "",
        "budget": format_bytes(trained.budget_bytes) if trained.budget_bytes else "",
        "lengths_over_budget": over,
        "losses_compared": len(pairs),
        "losses_equal_plain": bool(pairs) and all(one == other for one, other in pairs),
        "losses_near_plain": bool(pairs) and apart < TOLD_LOSSES,
        "note": trained.note,
    }


@dataclass(slots=True)
class Report:
    """Rows as they come, on the screen and in a file."""

    lengths: list[int]
    path: Path | None
    device: str
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    plain: Trained | None = None

    def save(self, trained: Trained) -> None:
        """What there is of a way."""
        if trained.way == "plain":
            self.plain = trained
        row = told(trained, self.lengths, self.plain)
        self.rows[trained.way] = {**row, "run": asdict(trained)}
        words = "  ".join(f"{name}={value}" for name, value in row.items() if value != "")
        print(words, file=sys.stderr, flush=True)
        if self.path is not None:
            save_results(self.path, list(self.rows.values()), self.device)

    def finish(self, trained: Trained) -> None:
        self.save(trained)
        row = {name: value for name, value in self.rows[trained.way].items() if name != "run"}
        print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)


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
    name = "shapes" + ("-compiled" if options.compiled else "") + f"-{device.type}.json"
    path = options.output / name if options.output else None
    report = Report(lengths, path, device_name(device) if device.type == "cuda" else "")
    loop = Loop(device, lengths, sizes["words"], BATCH[device.type], report.save)
    ways = options.ways.split(",")
    until, failures = time.perf_counter() + 60 * options.minutes, 0
    for number, way in enumerate(ways):
        share = (until - time.perf_counter()) / (len(ways) - number)
        failures += run_and_tell(Trained(way), loop, model, options, share, report)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        torch.compiler.reset()
    sys.exit(1 if failures else 0)


def run_and_tell(
    trained: Trained, loop: Loop, model: nn.Module, options: argparse.Namespace, seconds: float, report: Report
) -> bool:
    """One way, within its share of the time; says whether it failed."""
    is_watched = trained.way == "remat" and loop.device.type == "cpu" and not options.compiled
    start = time.perf_counter()
    failed = False
    try:
        run_way(trained, loop, model, options, start + (WATCHED_FROM if is_watched else 1.0) * seconds)
        if trained.way == "remat" and trained.budget_bytes:
            # The same bytes for every way: a share is of the largest shape, which the others do not know ahead.
            options.budget = trained.budget_bytes
        if is_watched:
            watch_peaks(trained, loop, model, options, start + seconds)
    except Exception as error:  # the next way is worth running whatever this one did
        trained.note, failed = f"failed after {trained.steps} steps: {type(error).__name__}: {error}", True
    report.finish(trained)
    return failed


if __name__ == "__main__":
    main()
