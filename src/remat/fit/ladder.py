"""The ladder: one lever more on each rung, from plain training to ZeRO-3 with its state on the host.

In: an `Evaluator` and a micro-batch. Out: rungs, each with what it should need and take, and what it really did where
this machine can run it.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from remat.core.budget import format_bytes
from remat.core.results.fit_sheet import FitRow, FitSheet
from remat.errors import RematError
from remat.fit.apply import make_optimizer_of, set_up
from remat.fit.found import row_of
from remat.fit.levers import Levers, Precision, Recomputation, Zero
from remat.fit.outcomes import Evaluator, Prediction
from remat.pytorch.measure.measure_step import measure_once, seconds_of
from remat.zoo.example import Example

TIMED, WARM = 3, 3


@dataclass(frozen=True, slots=True)
class Rung:
    name: str
    outcome: Prediction
    measured_peak_bytes: int | None = None
    measured_seconds: float | None = None
    note: str = ""

    def row(self) -> FitRow:
        seconds = self.measured_seconds
        return replace(
            row_of(self.outcome),
            label=self.name,
            measured_peak_bytes=self.measured_peak_bytes,
            measured_seconds_per_sample=None if seconds is None else seconds / self.outcome.levers.batch,
            note=self.note,
        )


def climb(evaluator: Evaluator, micro_batch: int, ranks: int = 8) -> Iterator[Rung]:
    """Every rung, predicted; those of several ranks give each as many samples as one has alone."""
    low = Precision.BF16 if "bf16" in dict(evaluator.cluster.device.flops_per_ns) else Precision.FP16
    plain = Levers(micro_batch=micro_batch)
    yield Rung("plain", evaluator.at_once(plain))
    per_block = replace(plain, recomputation=Recomputation.PER_BLOCK)
    yield Rung("+ checkpointing per block", evaluator.at_once(per_block))
    mixed = evaluator.at_once(replace(per_block, precision=low))
    yield Rung("+ mixed precision", mixed)
    # As much memory as checkpointing took, or what there is: the plan shows in the time, and on the next rungs.
    budget = min(mixed.peak_bytes, evaluator.cluster.capacity_bytes)
    planned = replace(plain, precision=low, recomputation=Recomputation.PLANNED, budget_bytes=budget)
    yield Rung("+ Remat's plan", evaluator.planned(planned))
    yield Rung("+ offload", _less_state(evaluator, planned))
    half = Precision.PURE_BF16 if low is Precision.BF16 else low
    shared = replace(per_block, precision=half, world=ranks)
    yield Rung(f"+ ZeRO-2 on {ranks}", evaluator.at_once(replace(shared, zero=Zero.GRADIENTS)))
    away = replace(shared, zero=Zero.WEIGHTS, offloads_optimizer=True)
    yield Rung(f"+ ZeRO-3 on {ranks}, CPU offload", evaluator.at_once(away))


def _less_state(evaluator: Evaluator, planned: Levers) -> Prediction:
    """The optimizer's state leaves the device; the plan has as much for activations as before."""
    assert planned.budget_bytes is not None, "the rung before is planned"
    levers = replace(planned, offloads_optimizer=True)
    there, away = (evaluator.optimistic(item).state for item in (planned, levers))
    less = max(0, there.resident_bytes - away.resident_bytes - away.update)
    return evaluator.planned(replace(levers, budget_bytes=planned.budget_bytes - less))


def measured(rung: Rung, example: Example, tell: Callable[[str], None] = lambda message: None) -> Rung:
    """The rung with what it really took here; with a note where it cannot run here."""
    levers = rung.outcome.levers
    if levers.world > 1:
        return replace(rung, note=f"needs {levers.world} ranks")
    tell(rung.name)
    try:
        peak, seconds = measure_levers(example, levers)
    except torch.OutOfMemoryError:
        return replace(rung, note="out of memory")
    except RematError as error:
        return replace(rung, note=str(error))
    return replace(rung, measured_peak_bytes=peak, measured_seconds=seconds)


def measure_levers(example: Example, levers: Levers) -> tuple[int, float]:
    """Peak bytes and seconds of a real step; the example's model stays as it is."""
    model = copy.deepcopy(example.model)
    made = set_up(model, make_optimizer_of(levers.optimizer, model), levers)
    del model

    def step() -> Any:
        return made.train_step(*example.args, **example.kwargs)

    for _ in range(WARM):
        step()
    seconds = statistics.median(seconds_of(step, made.device) for _ in range(TIMED))
    return measure_once(made.train_step, *example.args, **example.kwargs).peak_bytes, seconds


def ladder_sheet(name: str, evaluator: Evaluator, rungs: list[Rung], began: float) -> FitSheet:
    rows = tuple(rung.row() for rung in rungs)
    took = time.perf_counter() - began
    sentences = [f"{len(rungs)} rungs in {took:.1f} s.", *_ratios(rungs)]
    title = f"The ladder of {name} on {evaluator.cluster.device.name}"
    return FitSheet(title, evaluator.cluster.capacity_bytes, rows, tuple(sentences))


def _ratios(rungs: list[Rung]) -> Iterator[str]:
    first = rungs[0].outcome
    for rung in rungs[1:]:
        now = rung.outcome
        yield (
            f"{rung.name}: {now.peak_bytes / first.peak_bytes:.2f} of the plain peak "
            f"({format_bytes(now.state.resident_bytes)} state, {format_bytes(now.activation_bytes)} comes and goes), "
            f"{now.seconds_per_sample * now.levers.world / first.seconds_per_sample:.2f} of its time for each sample "
            "and rank."
        )
