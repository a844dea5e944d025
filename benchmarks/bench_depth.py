"""How planning grows with depth: recurrences of thousands of steps, networks of a thousand layers.

    python -m benchmarks.bench_depth [--kinds cell gru lstm resnet mlp] [--sizes 128 256 512] [--budgets 0.5x 0.1x]
                                     [--time-limit 30] [--train]

Each row comes from a process of its own: CPU seconds of every arrow, the most memory the process had, the overhead and
the proven gap. With --train a few steps are trained as plain PyTorch does and under the plan, and compared bit by bit.
"cell" is a Python loop over `nn.LSTMCell`, "gru" one over `nn.GRUCell`, "lstm" is `nn.LSTM` as it runs on this device,
"resnet" is the network for 32 x 32 images of which ResNet-1001 is one, with activations before convolutions, and "mlp"
has residual layers.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import resource
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from benchmarks.runs import save_results
from torch import Tensor, nn

SIZES = {
    "cell": (64, 256, 1024, 4096),
    "gru": (64, 256, 1024),
    "lstm": (64, 128, 256),
    "resnet": (101, 335, 1001),
    "mlp": (250, 1000, 4000),
}
BATCH, WIDTH, INPUTS = 16, 64, 8
STEPS = 2
ARROWS = {
    "plain peak": ("remat.pytorch.run.backend", "plain_step_of"),
    "short traces": ("remat.pytorch.run.backend", "long_step"),
    "joint tracing": ("remat.pytorch.run.backend", "aot_autograd"),
    "graph": ("remat.pytorch.run.variants", "capture"),
    "profile": ("remat.pytorch.run.variants", "profile"),
    "order": ("remat.solvers.schedule.order", "order_ops"),
    "solve": ("remat.solvers", "solve"),
    "addresses": ("remat.within", "lay_out"),
    "lower": ("remat.pytorch.run.lower", "lower"),
}
"""What is timed, as (module, function); "capture" is the rest up to the plan, which is Dynamo for the most part."""


class CellLoop(nn.Module):
    """One LSTM cell over a long sequence, unrolled in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(INPUTS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, sequence: Tensor, target: Tensor) -> Tensor:
        hidden = cell = sequence.new_zeros(sequence.shape[1], WIDTH)
        for step in range(sequence.shape[0]):
            hidden, cell = self.cell(sequence[step], (hidden, cell))
        return F.mse_loss(self.head(hidden), target)


class GatedLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(INPUTS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, sequence: Tensor, target: Tensor) -> Tensor:
        hidden = sequence.new_zeros(sequence.shape[1], WIDTH)
        for item in sequence:
            hidden = self.cell(item, hidden)
        return F.mse_loss(self.head(hidden), target)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(INPUTS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, sequence: Tensor, target: Tensor) -> Tensor:
        outputs, _ = self.recurrent(sequence)
        return F.mse_loss(self.head(outputs[-1]), target)


class ResidualLayers(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, rows: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            rows = rows + torch.relu(layer(rows))
        return F.mse_loss(rows, target)


class Bottleneck(nn.Module):
    """Norm, activation and convolution three times, around a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        inner = after // 4
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in (before, inner, inner))
        self.first = nn.Conv2d(before, inner, 1, stride=stride, bias=False)
        self.second = nn.Conv2d(inner, inner, 3, padding=1, bias=False)
        self.third = nn.Conv2d(inner, after, 1, bias=False)
        changes = before != after or stride > 1
        self.shortcut = nn.Conv2d(before, after, 1, stride=stride, bias=False) if changes else None

    def forward(self, image: Tensor) -> Tensor:
        active = F.relu(self.norms[0](image))
        beside = image if self.shortcut is None else self.shortcut(active)
        inner = self.second(F.relu(self.norms[1](self.first(active))))
        return beside + self.third(F.relu(self.norms[2](inner)))


class PreActivationResNet(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        blocks, before = [], 16
        for after, stride in ((64, 1), (128, 2), (256, 2)):
            for number in range((depth - 2) // 9):
                blocks.append(Bottleneck(before, after, stride if number == 0 else 1))
                before = after
        self.stem, self.blocks = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.Sequential(*blocks)
        self.norm, self.head = nn.BatchNorm2d(before), nn.Linear(before, 10)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        features = F.relu(self.norm(self.blocks(self.stem(image))))
        return F.cross_entropy(self.head(features.mean((2, 3))), target)


def build(kind: str, size: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    if kind == "resnet":
        return PreActivationResNet(size), (torch.randn(8, 3, 32, 32), torch.randint(10, (8,)))
    if kind == "mlp":
        return ResidualLayers(size), (torch.randn(BATCH * 16, WIDTH), torch.randn(BATCH * 16, WIDTH))
    model = {"cell": CellLoop, "gru": GatedLoop, "lstm": Recurrent}[kind]()
    return model, (torch.randn(size, BATCH, INPUTS), torch.randn(BATCH, WIDTH))


class Arrows:
    """CPU seconds inside functions; what one of them calls of the others is theirs."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[str] = ["rest"]
        self._since = time.process_time()

    def _turn(self) -> None:
        now = time.process_time()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.inside(name):
                made = function(*args, **kwargs)
            # A compiler is timed when it compiles.
            return self.timed(name, made) if name == "joint tracing" and callable(made) else made

        return call

    @contextmanager
    def watched(self) -> Iterator[None]:
        import importlib

        with ExitStack() as stack:
            for name, (module, function) in ARROWS.items():
                original = getattr(importlib.import_module(module), function)
                stack.enter_context(mock.patch(f"{module}.{function}", self.timed(name, original)))
            self._turn()
            yield
            self._turn()


def measure_once(kind: str, size: int, budget: str, options: argparse.Namespace) -> dict[str, Any]:
    """Plan in this process, and train where that is asked for."""
    import remat

    torch.set_num_threads(1)
    model, batch = build(kind, size)
    arrows, begun = Arrows(), time.perf_counter()
    row: dict[str, Any] = {"kind": kind, "size": size, "budget": budget}
    with arrows.watched(), arrows.inside("capture"):
        try:
            plan = remat.plan(copy.deepcopy(model), *batch, budget=budget, time_limit=options.time_limit)
        except remat.InfeasibleBudget as error:
            return row | {"refused": str(error), "cpu_seconds": dict(arrows.seconds)}
    row |= {
        "wall_s": time.perf_counter() - begun,
        "cpu_s": sum(arrows.seconds.values()),
        "cpu_seconds": dict(arrows.seconds),
        "ops": len(plan.problem.graph.ops),
        "plain_peak_mib": plan.plain_peak_bytes / 2**20,
        "predicted_mib": plan.predicted_peak / 2**20,
        "overhead": plan.overhead,
        "gap": plan.gap,
        "process_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    return row | (train(model, batch, plan) if options.train else {})


def train(model: nn.Module, batch: tuple[Tensor, Tensor], plan: Any) -> dict[str, Any]:
    """Steps as plain PyTorch does them, and under the plan."""
    import remat

    plain, planned = model, copy.deepcopy(model)
    applied = remat.apply(planned, plan)
    seconds = [_trained(step, net, batch) for step, net in ((plain, plain), (applied, planned))]
    pairs = zip(plain.state_dict().values(), planned.state_dict().values(), strict=True)
    return {"first_steps_cpu_s": seconds, "same_bits": all(torch.equal(left, right) for left, right in pairs)}


def _trained(step: Any, net: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    optimizer, begun = torch.optim.SGD(net.parameters(), lr=1e-3), time.process_time()
    for _ in range(STEPS):
        step(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.process_time() - begun


def in_own_process(kind: str, size: int, budget: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.bench_depth", "--once", kind, str(size), budget]
    command += ["--time-limit", str(options.time_limit), *(["--train"] if options.train else [])]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        return {"kind": kind, "size": size, "budget": budget, "failed": " ".join(last)}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(row: dict[str, Any]) -> None:
    head = f"{row['kind']:7s}{row['size']:6d} {row['budget']:>6s}"
    if "gap" not in row:
        print(head, row.get("refused") or row.get("failed"), flush=True)
        return
    parts = "  ".join(f"{name} {seconds:.1f}" for name, seconds in row["cpu_seconds"].items() if seconds >= 0.05)
    trained = f"  same bits: {row['same_bits']}" if "same_bits" in row else ""
    print(
        f"{head} {row['ops']:7d} ops {row['cpu_s']:7.1f} s CPU {row['process_gib']:5.2f} GiB  overhead "
        f"{row['overhead']:.2%} gap {row['gap']:.2%}{trained}\n    {parts}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--sizes", nargs="+", type=int, default=[])
    parser.add_argument("--budgets", nargs="+", default=["0.5x", "0.2x"])
    parser.add_argument("--time-limit", type=float, default=30.0)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--once", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        kind, size, budget = options.once
        print(json.dumps(measure_once(kind, int(size), budget, options)))
        return
    rows = []
    for kind in options.kinds:
        for size in options.sizes or SIZES[kind]:
            for budget in options.budgets:
                rows.append(in_own_process(kind, size, budget, options))
                show(rows[-1])
    save_results(options.output / "depth.json", rows)


if __name__ == "__main__":
    main()
