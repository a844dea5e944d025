"""Pipelines over gloo: what each rank trains, plainly and within a budget, and what it tells of it."""

from __future__ import annotations

import hashlib
import time
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

KINDS = ("gpipe", "1f1b", "interleaved")
LENGTH, WIDTH, VOCABULARY, DEPTH = 64, 96, 64, 8


def parts(count: int, depth: int = DEPTH) -> list[nn.Sequential]:
    """A small GPT in so many stages, the same on every rank."""
    from remat.zoo.transformer import Block, Embedding

    torch.manual_seed(0)
    blocks: list[nn.Module] = [Embedding(VOCABULARY, LENGTH, WIDTH, 0.1)]
    blocks += [Block(WIDTH, 4, 0.1, causal=True) for _ in range(depth)]
    blocks.append(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)))
    ends = [round(len(blocks) * number / count) for number in range(count + 1)]
    return [nn.Sequential(*blocks[start:end]) for start, end in zip(ends, ends[1:], strict=False)]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class PipelineTraining:
    """One rank's stages, their schedule and optimizer, and a batch."""

    def __init__(self, rank: int, world: int, kind: str, micros: int, budget: str | None, **options: Any) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

        from remat.distributed import plan_pipeline

        several = kind == "interleaved"
        modules = parts(world * (2 if several else 1))
        numbers = [rank, rank + world] if several else [rank]
        self.stages = [PipelineStage(modules[place], place, len(modules), torch.device("cpu")) for place in numbers]
        made = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}[kind]
        self.schedule = made(self.stages if several else self.stages[0], micros, loss_fn=loss_of)
        self.parameters = [item for stage in self.stages for item in stage.submod.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3)
        generator = torch.Generator().manual_seed(5)
        tokens = torch.randint(VOCABULARY, (8 * micros, LENGTH + 1), generator=generator)
        self.given = (tokens[:, :-1].contiguous(),) if rank == 0 else ()
        self.target = tokens[:, 1:].contiguous() if rank == world - 1 else None
        self.planned = None
        if budget is not None:
            self.planned = plan_pipeline(self.stages, self.schedule, budget=budget, optimizer=self.optimizer, **options)
        torch.manual_seed(rank)

    def run(self) -> list[float]:
        losses: list[torch.Tensor] = []
        if self.target is None:
            self.schedule.step(*self.given)
        else:
            self.schedule.step(*self.given, target=self.target, losses=losses)
        return [loss.item() for loss in losses]

    def train(self, steps: int) -> list[list[float]]:
        found = []
        for _ in range(steps):
            found.append(self.run())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return found

    def peaks(self, count: int = 2) -> list[int]:
        """Measured, with the room in which stages receive."""
        import remat
        from remat.pytorch._compat.pipelining import received_bytes

        room = sum(map(received_bytes, self.stages))
        schedule, given, target, optimizer = self.schedule, self.given, self.target, self.optimizer

        def step() -> None:
            if target is None:
                schedule.step(*given)
            else:
                schedule.step(*given, target=target, losses=[])
            optimizer.zero_grad()

        return [remat.measure(step).peak_bytes + room for _ in range(count)]

    def bits(self) -> str:
        found = hashlib.sha256()
        for item in self.parameters:
            found.update(item.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()[:16]


def trained(rank: int, world: int, kind: str, micros: int, shares: list[str], steps: int) -> dict[str, Any]:
    """Plainly, and under each budget, in one process."""
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for share in (None, *shares):
        training = PipelineTraining(rank, world, kind, micros, share)
        losses = training.train(steps)
        row: dict[str, Any] = {"losses": losses, "bits": training.bits(), "peaks": training.peaks()}
        if training.planned is not None:
            planned = training.planned
            row |= {"budget": planned.budget_bytes, "predicted": planned.predicted_peak}
            row |= {"plain": planned.plain_peak_bytes, "in_flight": planned.in_flight}
            row |= {"overhead": [plan.overhead for plan in planned.plans.values()]}
        found[share or "plain"] = row
    return found


def timed(rank: int, world: int, kind: str, micros: int, share: str, rounds: int) -> dict[str, Any]:
    """Steps with waits filled and without, in turns; and where they are in a trace."""
    warnings.simplefilter("ignore")
    ways = {fills: PipelineTraining(rank, world, kind, micros, share, fill_bubbles=fills) for fills in (True, False)}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for training in ways.values():
        training.train(2)
    for _ in range(rounds):
        for fills, training in ways.items():
            began = time.perf_counter()
            training.run()
            seconds[fills].append(time.perf_counter() - began)
    planned = ways[True].planned
    assert planned is not None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        ways[True].run()
    events = [
        item for item in profiler.events() if item.name.startswith(("remat: computed early", "Backward", "Forward"))
    ]
    return {
        "filled_s": sorted(seconds[True]),
        "unfilled_s": sorted(seconds[False]),
        "early_ms": {number: item.early_ns / 1e6 for number, item in planned.needs.items()},
        "predicted_filled_ms": planned.times.total_ns / 1e6,
        "predicted_unfilled_ms": planned.times_without_filling.total_ns / 1e6,
        "trace": [(item.name, item.time_range.start, item.time_range.end) for item in events],
    }
