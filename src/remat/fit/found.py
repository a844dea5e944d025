"""`remat.fit`: a model, its batch and some GPUs in, the best way to train it there out.

A `Fit` tells what was chosen (`best`), shows all that was looked at (`table`, `to_html`), says why (`explain`) and sets
it up on this machine (`apply`).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from remat.core.budget import format_bytes
from remat.core.results.fit_sheet import FitRow, FitSheet
from remat.errors import RematError, UnknownName
from remat.fit.apply import SetUp, set_up
from remat.fit.cluster import Cluster, find_cluster
from remat.fit.levers import Levers, OptimizerKind, Precision, Recomputation, Zero, read_allowed
from remat.fit.outcomes import Evaluator, Prediction, Traces
from remat.fit.search import DEFAULT_ALLOWED, LeverSearch, LeversFound

SHOWN = 12


@dataclass(frozen=True)
class Fit:
    """The best combination of levers, and what else there was."""

    name: str
    cluster: Cluster
    found: LeversFound
    evaluator: Evaluator

    @property
    def best(self) -> Prediction:
        """The fastest for each sample of those that fit."""
        return self.found.outcomes[0]

    @property
    def levers(self) -> Levers:
        return self.best.levers

    def table(self) -> str:
        """All that was looked at, fastest first, then what does not fit."""
        from rich.console import Console

        from remat.report.tables.fit import fit_chart, fit_sheet

        console = Console(width=180, record=True, file=io.StringIO())
        console.print(fit_sheet(self.sheet()).as_table())
        return f"{console.export_text()}\n{fit_chart(self.sheet())}\n"

    def explain(self) -> str:
        """Why the winner wins, and what each of its levers saved or cost."""
        return "\n".join(self.sentences())

    def to_html(self, path: str | Path) -> Path:
        """One page that any browser opens offline."""
        from remat.report.html.fit_page import write_fit_page

        return write_fit_page(self.sheet(), path)

    def apply(self, model: nn.Module, optimizer: Optimizer) -> SetUp:
        """The winner, set up for a model and its optimizer on this machine; use the result's instead of them."""
        return set_up(model, optimizer, self.levers)

    def sheet(self) -> FitSheet:
        shown = (*self.found.outcomes, *self.found.misfits)[:SHOWN]
        title = f"{self.name} on {self.cluster.gpus} x {self.cluster.device.name}"
        return FitSheet(title, self.cluster.capacity_bytes, tuple(map(row_of, shown)), tuple(self.sentences()))

    def sentences(self) -> Iterator[str]:
        best = self.best
        yield (
            f"Fastest of {self.found.considered} combinations: {best.levers.label}, "
            f"{best.seconds_per_sample * 1e3:.3g} ms for each sample, {format_bytes(best.peak_bytes)} of "
            f"{format_bytes(self.cluster.capacity_bytes)}; {self.found.pruned} others cannot be faster, or cannot fit "
            "whatever is recomputed."
        )
        yield from (_compared(best, what, other) for what, other in self.without_each())

    def without_each(self) -> Iterator[tuple[str, Prediction]]:
        """The winner with one of its levers left alone, for each of them."""
        for what, levers in _neighbours(self.best.levers):
            yield what, self.evaluator.at_once(levers)


def fit(
    model: nn.Module,
    *args: Any,
    gpu: str,
    gpus: int = 1,
    batch: int | None = None,
    optimizer: str = OptimizerKind.ADAMW.value,
    allow: str | Iterable[str] | None = None,
    link: str | None = None,
    between: str = "InfiniBand-400",
    memory: int | None = None,
    devices: Iterable[str | Path] = (),
    links: Iterable[str | Path] = (),
    time_limit: float = 2.0,
    tell: Callable[[str], None] = lambda message: None,
    **kwargs: Any,
) -> Fit:
    """The best way to train `model(*args, **kwargs)` on `gpus` of `gpu`, a name of the catalogue as "H100-80GB".

    `batch` is that of one step of the whole job; without it, each rank takes as many samples as are fastest. `allow`
    names the levers that may be pulled, as "bf16,zero,recompute". `link` is between GPUs of one machine, `between` from
    one machine to the next; `memory` caps the bytes of each GPU. Nothing runs, and the model may be of any size: give
    one on "meta".
    """
    if not isinstance(model, nn.Module):
        raise RematError(f"fit needs a module, got {type(model).__name__}; pass the model and its batch.")
    cluster = find_cluster(gpu, gpus, link=link, between=between, memory_bytes=memory, devices=devices, links=links)
    traces = Traces(model, args, kwargs, cluster.device.name, tuple(devices))
    evaluator = Evaluator(traces, cluster, time_limit)
    search = LeverSearch(evaluator, optimizer_kind(optimizer), allowed_levers(allow), batch, tell)
    return Fit(type(model).__name__, cluster, search.run(), evaluator)


def optimizer_kind(name: str) -> OptimizerKind:
    if name not in tuple(OptimizerKind):
        raise UnknownName(f"No optimizer is called {name!r} here; choose one of {', '.join(OptimizerKind)}.")
    return OptimizerKind(name)


def allowed_levers(allow: str | Iterable[str] | None) -> frozenset[str]:
    if allow is None:
        return DEFAULT_ALLOWED
    return read_allowed(allow if isinstance(allow, str) else ",".join(allow))


def row_of(outcome: Prediction) -> FitRow:
    state = [(item.name.replace("_", " "), getattr(outcome.state, item.name)) for item in fields(outcome.state)]
    memory = [(name, size) for name, size in state if size and name not in ("update", "host")]
    times = [(item.name.removesuffix("_s"), getattr(outcome.time, item.name)) for item in fields(outcome.time)]
    return FitRow(
        label=outcome.levers.label,
        peak_bytes=outcome.peak_bytes,
        seconds_per_sample=outcome.seconds_per_sample,
        fits=outcome.fits,
        memory=(*memory, ("activations", max(0, outcome.activation_bytes))),
        times=tuple(times),
    )


def _neighbours(levers: Levers) -> Iterator[tuple[str, Levers]]:
    plain = replace(levers, recomputation=Recomputation.NONE, budget_bytes=None, offloads_activations=False)
    if levers.recomputation is not Recomputation.NONE:
        yield "nothing recomputed", plain
    if levers.precision is not Precision.FP32:
        yield "fp32", replace(plain, precision=Precision.FP32)
    if levers.zero is not Zero.REPLICATED and not levers.offloads_optimizer:
        yield "nothing sharded", replace(plain, zero=Zero.REPLICATED)
    if levers.offloads_optimizer:
        yield "the state on the device", replace(plain, offloads_optimizer=False)
    if levers.accumulation > 1:
        yield (
            "the whole batch at once",
            replace(plain, micro_batch=levers.micro_batch * levers.accumulation, accumulation=1),
        )
    if levers.pipeline_stages > 1:
        yield "no pipeline", replace(plain, pipeline_stages=1)


def _compared(best: Prediction, what: str, other: Prediction) -> str:
    saved = other.peak_bytes - best.peak_bytes
    slower = best.seconds_per_sample / other.seconds_per_sample - 1
    memory = f"saves {format_bytes(saved)}" if saved >= 0 else f"takes {format_bytes(-saved)} more"
    time = f"costs {slower:.1%} of time" if slower >= 0 else f"saves {-slower:.1%} of time"
    return f"Against {what}, it {memory} and {time}{'' if other.fits else ', which would not fit'}."
