"""Pipelines over gloo: what each rank trains, plainly and within a budget, and what it tells of it."""

from __future__ import annotations

import hashlib
import time
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

KINDS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}
TWICE = ("interleaved", "zero bubble", "zbv")
"""With two stages a rank; the last has them in the shape of a V."""
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


class Elsewhere(nn.Module):
    """Stands for what another device computes: it takes its time, and no core of this machine."""

    def __init__(self, forward_ms: float, backward_ms: float) -> None:
        super().__init__()
        self._ms = forward_ms, backward_ms

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _elsewhere(x, *self._ms)


@torch.library.custom_op("remat_benchmarks::elsewhere", mutates_args=())
def _elsewhere(x: torch.Tensor, now_ms: float, later_ms: float) -> torch.Tensor:
    time.sleep(now_ms / 1000)
    return x.clone()


@_elsewhere.register_fake
def _(x: torch.Tensor, now_ms: float, later_ms: float) -> torch.Tensor:
    return torch.empty_like(x)


def _note_time(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.later_ms = inputs[2]


def _elsewhere_back(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return _elsewhere(gradient, ctx.later_ms, 0.0), None, None


_elsewhere.register_autograd(_elsewhere_back, setup_context=_note_time)


def slow_end(forward_ms: float, backward_ms: float) -> list[nn.Module]:
    """A small GPT in two stages, of which the second is short and waits for another device."""
    first, second = parts(2)
    return [nn.Sequential(*first, *second[:-2]), nn.Sequential(Elsewhere(forward_ms, backward_ms), *second[-2:])]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class PipelineTraining:
    """One rank's stages, their schedule and optimizer, and a batch."""

    def __init__(self, rank: int, world: int, kind: str, micros: int, budget: str | None, **options: Any) -> None:
        """`options` are of `plan_pipeline`, and `modules` those of all stages in the place of a small GPT's."""
        from torch.distributed import pipelining

        from remat.distributed import plan_pipeline

        several = kind in TWICE
        modules = options.pop("modules", None) or parts(world * (2 if several else 1))
        second = 2 * world - 1 - rank if kind == "zbv" else world + rank
        numbers = [rank, second] if several else [rank]
        self.stages = [
            pipelining.PipelineStage(modules[place], place, len(modules), torch.device("cpu")) for place in numbers
        ]
        made = getattr(pipelining, KINDS[kind])
        self.schedule = made(self.stages if several else self.stages[0], micros, loss_fn=loss_of)
        self.parameters = [item for stage in self.stages for item in stage.submod.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3)
        generator = torch.Generator().manual_seed(5)
        tokens = torch.randint(VOCABULARY, (8 * micros, LENGTH + 1), generator=generator)
        self.given = (tokens[:, :-1].contiguous(),) if rank == 0 else ()
        self.target = tokens[:, 1:].contiguous() if self.stages[-1].is_last else None
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


def timed(rank: int, kind: str, micros: int, share: str, rounds: int, slow_ms: tuple[float, float]) -> dict[str, Any]:
    """Steps of one plan with waits filled and without, in turns; and where they are in a trace."""
    warnings.simplefilter("ignore")
    # The last rank has little to give up, and whoever it waits for does not compute here.
    training = PipelineTraining(rank, 2, kind, micros, "1x" if rank else share, modules=slow_end(*slow_ms))
    training.train(2)
    planned = training.planned
    assert planned is not None
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds):
        for fills in (True, False) if number % 2 else (False, True):
            planned.fills = fills
            torch.distributed.barrier()
            began = time.perf_counter()
            training.run()
            torch.distributed.barrier()
            seconds[fills].append(time.perf_counter() - began)
            training.optimizer.zero_grad()
    planned.fills = True
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        training.run()
    events = [
        item for item in profiler.events() if item.name.startswith(("remat: computed early", "Backward", "Forward"))
    ]
    return {
        "filled_s": seconds[True],
        "unfilled_s": seconds[False],
        "early_ms": {number: item.early_ns / 1e6 for number, item in planned.needs.items()},
        "predicted_filled_ms": planned.times.total_ns / 1e6,
        "predicted_unfilled_ms": planned.times_without_filling.total_ns / 1e6,
        "trace": [(item.name, item.time_range.start, item.time_range.end) for item in events],
        "peak": max(training.peaks()),
        "budget_bytes": planned.budget_bytes,
    }
