"""One configuration in a process of its own: made ready, run once for its figures, and timed when asked.

In: a `Request`. Out: `Prepared` facts, then any number of `Timed` ones. A step is forward under bf16 autocast and
backward, from parameters without gradients. On CUDA the clock is the device's and the peak is the caching allocator's;
on a CPU every allocation is followed.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch._dynamo
import torch._inductor.async_compile
from benchmarks.frontier.models import build
from benchmarks.frontier.ways import Way, made_ready, treatment_of, way_from
from benchmarks.frontier.workloads import Workload
from torch import Tensor
from torch.autograd.graph import save_on_cpu

import remat
from remat.core.copies import copies_of, has_copies
from remat.core.engines import follow_copies
from remat.pytorch.measure.measure_step import measure_once

WARM_UP = 3
"""Steps before a figure is taken: a plan may be corrected after the second."""
ALONE = 10
"""Steps with the device to itself before the first figures: those while others got ready say nothing of the device."""


@dataclass(frozen=True, slots=True)
class Request:
    model: str
    way: Way
    device: str
    batch: int | None = None
    cap_bytes: int | None = None
    """On CUDA what the allocator may take from the device."""
    with_digest: bool = False

    def encode(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def decode(fields: dict[str, Any]) -> Request:
        return Request(**{**fields, "way": way_from(fields["way"])})


@dataclass(frozen=True, slots=True)
class Prepared:
    seconds: float
    """Of the first steps: capture, planning and compilation are most of it."""
    graphs: int
    loss: float | None
    """Of the first step; None where it is no finite number."""
    gradient_norm: float | None
    first_peak_bytes: int | None
    """Of all steps until now, what compilation tries out included; known on CUDA alone."""
    predicted_bytes: int | None
    predicted_ms: float | None
    budget_bytes: int | None
    kernels_ms: float | None = None
    gap: float | None = None
    copies: int | None = None
    """Values that spend a while on the host."""
    host_bytes: int | None = None
    """What they take there at once."""
    waited_ms: float | None = None
    """What ops wait for copies, as predicted."""
    digest: str | None = None
    """Of the bits of the first step's gradients, where it was asked for and eager's kernels give them every time."""


@dataclass(frozen=True, slots=True)
class Timed:
    step_ms: tuple[float, ...]
    peak_bytes: int
    reserved_bytes: int | None
    predicted_ms: float | None = None
    """What the plan says of its steps before these, with what it has learnt from those that came before."""


# No slots: what a step can reach is found through the attributes of the object.
class Trial:
    def __init__(self, request: Request) -> None:
        self.way, self.with_digest = request.way, request.with_digest and not request.way.compiled
        self.device = torch.device(request.device)
        self._was_timed = False
        if request.cap_bytes is not None and self.on_cuda:
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, request.cap_bytes / total))
        self.workload: Workload = build(request.model, request.device, request.batch)
        self.call: Callable[..., Any] = made_ready(self.way, self.workload.model)

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def step(self) -> Tensor:
        self.workload.model.zero_grad(set_to_none=True)
        on_host = save_on_cpu(pin_memory=self.on_cuda) if self.way.saves_on_host else contextlib.nullcontext()
        with torch.autocast(self.device.type, torch.bfloat16), on_host:
            loss: Tensor = self.call(self.workload.inputs, self.workload.labels)
        loss.backward()
        return loss.detach()

    def prepare(self) -> Prepared:
        start = time.perf_counter()
        torch.manual_seed(1)
        loss, norm = float(self.step()), self._gradient_norm()
        digest = self._repeated_digest() if self.with_digest else None
        for _ in range(WARM_UP - 1):
            # Several graphs are planned together after the first step.
            self.step()
        if self.on_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() if self.on_cuda else None
        promised = self._promised()
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        self.park()
        # Helpers of the compiler would wait beside every process that waits.
        torch._inductor.async_compile.shutdown_compile_workers()
        return Prepared(
            seconds, graphs, _finite(loss), _finite(norm), peak, *promised, **self._planned(), digest=digest
        )

    def time(self, steps: int) -> Timed:
        for _ in range(ALONE if self.on_cuda and not self._was_timed else WARM_UP):
            self.step()
        self._was_timed = True
        predicted_ms = self._promised()[1]
        timed = self._time_cuda(steps) if self.on_cuda else self._time_cpu(steps)
        self.park()
        return replace(timed, predicted_ms=predicted_ms)

    def park(self) -> None:
        """Leave the device to others: only parameters and inputs stay."""
        self.workload.model.zero_grad(set_to_none=True)
        gc.collect()
        if self.on_cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _time_cuda(self, steps: int) -> Timed:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        marks[0].record()
        for mark in marks[1:]:
            self.step()
            mark.record()
        torch.cuda.synchronize()
        times = tuple(before.elapsed_time(after) for before, after in zip(marks, marks[1:], strict=False))
        return Timed(times, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())

    def _time_cpu(self, steps: int) -> Timed:
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            self.step()
            times.append(1e3 * (time.perf_counter() - start))
        self.workload.model.zero_grad(set_to_none=True)
        return Timed(tuple(times), measure_once(self.step).peak_bytes, None)

    def _gradient_norm(self) -> float:
        gradients = [item.grad for item in self.workload.model.parameters() if item.grad is not None]
        return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))

    def _repeated_digest(self) -> str | None:
        """Of the step that has just run; None where the same step again has other bits by itself."""
        found = self._digest()
        torch.manual_seed(1)
        self.step()
        return found if self._digest() == found else None

    def _digest(self) -> str:
        found = hashlib.blake2b()
        for item in self.workload.model.parameters():
            if item.grad is not None:
                found.update(item.grad.contiguous().view(torch.uint8).cpu().numpy())
        return found.hexdigest()

    def _planned(self) -> dict[str, Any]:
        """What else the plan says: how far it is from the best, what its kernels take, what it has on the host."""
        try:
            plan = remat.plan_of(self.call)
        except remat.RematError:
            return {}
        if plan.compiled is not None:
            host_bytes = sum(cut.away_bytes for cut in plan.compiled.cuts) or None
            return {"gap": plan.gap, "host_bytes": host_bytes, "kernels_ms": plan.compiled.time_ns / 1e6}
        if plan.schedule is None or not has_copies(plan.problem.graph):
            return {"gap": plan.gap}
        engines, count = follow_copies(plan.problem, plan.schedule), len(copies_of(plan.problem.graph))
        waited_ms = engines.waited_ns / 1e6
        return {"gap": plan.gap, "copies": count, "host_bytes": engines.host_peak_bytes, "waited_ms": waited_ms}

    def _promised(self) -> tuple[int | None, float | None, int | None]:
        """The peak and the time that the plan predicts, and the budget in bytes."""
        if self.way.budget is None:
            return None, None, None
        try:
            plan = remat.plan_of(self.call)
        except remat.RematError:
            # A step that runs unplanned is measured against its budget all the same.
            return None, None, self.way.budget_bytes
        return plan.predicted_peak, plan.predicted_time / 1e6, plan.budget_bytes


@contextlib.contextmanager
def opened(request: Request) -> Any:
    """A trial within the treatment that its way asks for."""
    trial = Trial(request)
    with treatment_of(request.way, trial.workload.model):
        yield trial


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
