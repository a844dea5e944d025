"""What `remat.dtr` costs: steps that decide in Python what they compute, plain and within shares of their activations.

    python -m benchmarks.bench_online [--models lstm,experts] [--shares 1,0.7,0.5] [--steps 7] [--output FOLDER]

Every timed step within a budget is preceded by a plain one, and the ratio is the median of those pairs. A share of 1
shows what noting every op costs by itself. Peaks are measured, beyond what is there when the step begins; the last
columns set the recomputation beside the best schedule that the solvers find for the same ops.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.runs import save_results
from torch import nn
from torch.nn import functional as F

import remat
from remat.core.budget import format_bytes
from remat.pytorch.measure.measure_step import measure_once


class Reader(nn.Module):
    """An LSTM cell over as many words as there are."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = memory = torch.zeros_like(words[0])
        for word in words:
            hidden, memory = self.cell(word, (hidden, memory))
        return hidden.square().mean()


class Experts(nn.Module):
    """Samples go to one of four experts, chosen in Python."""

    def __init__(self, width: int = 256, count: int = 4, depth: int = 6) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(width, count) for _ in range(depth))
        self.experts = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(count)
            )
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for router, experts in zip(self.routers, self.experts, strict=True):
            scores = router(x).softmax(1)
            best, update = scores.argmax(1), torch.zeros_like(x)
            for number in range(len(experts)):
                chosen = (best == number).nonzero().flatten()
                if len(chosen):
                    update = update.index_add(0, chosen, experts[number](x[chosen]) * scores[chosen, number, None])
            x = F.layer_norm(x + update, x.shape[1:])
        return x.square().mean()


class Layers(nn.Module):
    """A plain chain, for comparison."""

    def __init__(self, width: int = 512, depth: int = 12) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


CASES: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "lstm": lambda: (Reader(), torch.randn(40, 128, 256)),
    "experts": lambda: (Experts(), torch.randn(2048, 256)),
    "layers": lambda: (Layers(), torch.randn(2048, 512)),
}


@dataclass(frozen=True, slots=True)
class Row:
    model: str
    share: float
    budget_bytes: int
    peak_bytes: int
    """Measured, beyond what is there when the step begins."""
    step_ms: float
    ratio: float
    """Over the plain step's time."""
    evictions: int
    recomputations: int
    recomputed_share: float
    """Time of ops that ran again, of the time of all ops of the plain step."""
    excess: float
    """Time of all ops beyond that of the best schedule known for the same trace."""
    same_gradients: bool


def measured(model: nn.Module, x: torch.Tensor, name: str, share: float, steps: int, solve_s: float) -> Row:
    plain = _step(model, x)
    expected = [item.grad for item in model.parameters()]
    whole = _activation_bytes(plain)
    budget = int(share * whole)
    contexts: list[Any] = []

    def within() -> None:
        with remat.dtr(budget) as online:
            plain()
        contexts[:] = [online]

    pairs = [(_seconds(plain), _seconds(within)) for _ in range(steps)]
    same = all(map(torch.equal, expected, (item.grad for item in model.parameters())))
    found = contexts[0].hindsight(time_limit=solve_s)
    return Row(
        model=name,
        share=share,
        budget_bytes=budget,
        peak_bytes=_activation_bytes(within),
        step_ms=1000 * statistics.median(seconds for _, seconds in pairs),
        ratio=statistics.median(ours / theirs for theirs, ours in pairs),
        evictions=contexts[0].evictions,
        recomputations=contexts[0].recomputations,
        recomputed_share=found.online_ns / found.plain_ns - 1,
        excess=found.excess,
        same_gradients=same,
    )


def _step(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        model(x).backward()

    step()
    return step


def _activation_bytes(step: Callable[[], Any]) -> int:
    found = measure_once(step)
    return found.peak_bytes - found.timeline[0]


def _seconds(step: Callable[[], Any]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--shares", default="1,0.7,0.5,0.35")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--solve", type=float, default=5.0, help="seconds for the schedule to compare with")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name in options.models.split(","):
        for share in map(float, options.shares.split(",")):
            torch.manual_seed(0)
            rows.append(measured(*CASES[name](), name, share, options.steps, options.solve))
            row = rows[-1]
            print(
                f"{name:8} {share:5.0%} of {format_bytes(row.budget_bytes / share):>10}  peak "
                f"{row.peak_bytes / row.budget_bytes:5.1%} of budget  {row.step_ms:7.1f} ms  {row.ratio:5.2f}x  "
                f"{row.evictions:5} evicted  {row.recomputed_share:6.1%} again  {row.excess:6.1%} above the best  "
                f"{'same gradients' if row.same_gradients else 'GRADIENTS DIFFER'}",
                flush=True,
            )
    save_results(options.output / "online.json", [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
