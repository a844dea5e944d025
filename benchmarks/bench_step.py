"""Step time and peak memory: plain eager PyTorch, per-block checkpointing, and Remat at several budgets.

    python -m benchmarks.bench_step [--device cuda] [--models gpt,resnet18] [--steps 7] [--output benchmarks/results]

Every timed step of a variant is preceded by one of plain eager, and the ratio is the median of those pairs, so that it
does not depend on what else the machine does. Peaks are measured (CUDA: `max_memory_allocated`; CPU: every allocation
followed).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.runs import save_results

import remat
from remat import zoo
from remat.core.budget import format_bytes

BUDGETS = ("50x", "0.8x", "0.6x", "0.5x", "0.4x", "0.3x")
CPU_MODELS = ("gpt", "bert", "vit", "resnet18", "resnet50", "unet", "lstm", "mlp")
CUDA_MODELS = ("gpt2-medium", "resnet50-large")


@dataclass(frozen=True, slots=True)
class Row:
    model: str
    variant: str
    step_ms: float
    ratio: float
    """Step time over plain eager's in the same run."""
    peak_bytes: int
    predicted_bytes: int | None
    budget_bytes: int | None
    gap: float | None
    same_loss: bool
    plan_seconds: float | None


@dataclass(frozen=True, slots=True)
class Case:
    """A model, a batch, and the step that trains it."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: bool

    def step(self, model: Callable[..., Any]) -> float:
        context = torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext()
        with context:
            output = model(*self.args, **self.kwargs)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        self.model.zero_grad(set_to_none=True)
        return float(loss.detach())

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def build(name: str, device: str) -> Case:
    if name == "gpt2-medium":
        import transformers

        config = transformers.GPT2Config(n_embd=1024, n_layer=24, n_head=16)
        model = transformers.GPT2LMHeadModel(config).to(device)
        tokens = torch.randint(50257, (16, 1024), device=device)
        return Case(model, (), {"input_ids": tokens, "labels": tokens}, autocast=True)
    if name == "resnet50-large":
        example = zoo.build("resnet50", scale="demo", device=device, batch=128, side=112, width=64, shrink=1)
        return Case(example.model, example.args, example.kwargs, autocast=True)
    sizes = zoo.SMALL_IMAGES if name == "resnet18" else {}
    example = zoo.build(name, scale="demo", device=device, **sizes)
    return Case(example.model, example.args, example.kwargs, autocast=False)


def peak_of(case: Case, model: Callable[..., Any]) -> int:
    if case.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        case.step(model)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def step() -> float:
        return case.step(model)

    return remat.measure(step).peak_bytes


def checkpointed(case: Case) -> Callable[..., Any] | None:
    """The model with per-block checkpointing, where the model offers it."""
    enable = getattr(case.model, "gradient_checkpointing_enable", None)
    if enable is None:
        return None

    def call(*args: Any, **kwargs: Any) -> Any:
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        try:
            return case.model(*args, **kwargs)
        finally:
            case.model.gradient_checkpointing_disable()

    return call


def run(name: str, device: str, steps: int, budgets: tuple[str, ...]) -> list[Row]:
    """Plain eager first, then every variant, each timed step beside one of plain eager."""
    case = build(name, device)
    case.step(case.model)
    rows = [compared(case, name, "plain eager", case.model, steps)]
    show_row(rows[-1])
    peer = checkpointed(case)
    if peer is not None:
        rows.append(compared(case, name, "per-block checkpoint", peer, steps))
        show_row(rows[-1])
    optimized = remat.optimize(case.model, budget=budgets[0])
    for budget in budgets:
        remat.set_budget(optimized, budget)
        start = time.perf_counter()
        try:
            case.step(optimized)
        except remat.InfeasibleBudget as error:
            print(f"remat {budget}: {error}", flush=True)
            continue
        planning = time.perf_counter() - start
        variant = "remat, no limit" if budget == "50x" else f"remat {budget}"
        rows.append(compared(case, name, variant, optimized, steps, remat.plan_of(optimized), planning))
        show_row(rows[-1])
    return rows


def compared(
    case: Case,
    name: str,
    variant: str,
    model: Callable[..., Any],
    steps: int,
    plan: remat.Plan | None = None,
    planning: float | None = None,
) -> Row:
    plain, ours = [], []
    case.step(model)
    for _ in range(steps):
        plain.append(timed(case, case.model))
        ours.append(timed(case, model))
    return Row(
        model=name,
        variant=variant,
        step_ms=statistics.median(ours) * 1e3,
        ratio=statistics.median(mine / theirs for mine, theirs in zip(ours, plain, strict=True)),
        peak_bytes=peak_of(case, model),
        predicted_bytes=None if plan is None else plan.predicted_peak,
        budget_bytes=None if plan is None else plan.budget_bytes,
        gap=None if plan is None else plan.gap,
        same_loss=seeded_loss(case, model) == seeded_loss(case, case.model),
        plan_seconds=planning,
    )


def timed(case: Case, model: Callable[..., Any]) -> float:
    if case.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    case.step(model)
    if case.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def seeded_loss(case: Case, model: Callable[..., Any]) -> float:
    torch.manual_seed(0)
    return case.step(model)


def show_header() -> None:
    print(
        f"{'variant':22} {'step ms':>9} {'ratio':>6} {'peak':>11} {'predicted':>11} {'budget':>11} {'gap':>7} "
        f"{'plan s':>6} loss"
    )


def show_row(row: Row) -> None:
    predicted = format_bytes(row.predicted_bytes) if row.predicted_bytes else ""
    budget = format_bytes(row.budget_bytes) if row.budget_bytes and row.budget_bytes < 10 * row.peak_bytes else ""
    gap = f"{row.gap:.2%}" if row.gap is not None else ""
    planning = f"{row.plan_seconds:.1f}" if row.plan_seconds is not None else ""
    print(
        f"{row.variant:22} {row.step_ms:9.1f} {row.ratio:6.3f} {format_bytes(row.peak_bytes):>11} {predicted:>11} "
        f"{budget:>11} {gap:>7} {planning:>6} {'same' if row.same_loss else 'DIFFERS'}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", default="")
    parser.add_argument("--budgets", default=",".join(BUDGETS))
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    names = options.models.split(",") if options.models else (CUDA_MODELS if options.device == "cuda" else CPU_MODELS)
    rows: list[Row] = []
    for name in names:
        print(f"\n== {name} on {options.device}, torch {torch.__version__}")
        show_header()
        rows.extend(run(name, options.device, options.steps, tuple(options.budgets.split(","))))
        path = options.output / f"step_{options.device}.json"
        save_results(path, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
