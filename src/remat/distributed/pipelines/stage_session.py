"""One stage of a pipeline while it runs: the same program for every micro-batch.

In: a module, captured once for a micro-batch, and what was planned for it. A micro-batch that has gone forward is known
by its number; before its gradients come, what backward computes again first can be computed ahead (`compute_early`).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from remat.core.results.plan import Plan
from remat.distributed.pipelines.early import EarlyBackward
from remat.errors import CaptureError
from remat.pytorch._compat.distributed import shallow_copy
from remat.pytorch._compat.tensors import plain_call, replace_call
from remat.pytorch.resident.memory import ResidentMemory
from remat.pytorch.run.backend import EagerKernels, SessionBackend
from remat.pytorch.run.execute import Chosen, Saved
from remat.pytorch.run.lower import Lowered
from remat.pytorch.run.runner import Runner
from remat.pytorch.run.session import Session
from remat.pytorch.run.settings import CaptureReady, Settings
from remat.pytorch.run.shapes.known import AnyGraph
from remat.pytorch.run.variants import TracedGraph, Variant


@dataclass(slots=True)
class StageSession(Session):
    """Runs what was planned for a stage's one graph, however many of its micro-batches wait."""

    program: Lowered | None = None
    early: EarlyBackward | None = None
    made: Plan | None = None
    micros: tuple[int, ...] = ()
    """Of the step under way, in the order in which they go forward; torch's own look at shapes is of no step."""
    forwards: dict[int, weakref.ref[Saved]] = field(default_factory=dict)
    """Micro-batches that have gone forward in it."""
    backwards: set[int] = field(default_factory=set)
    """Those that have gone back."""
    _warned: bool = False

    def __post_init__(self) -> None:
        Session.__post_init__(self)
        # Room to receive in is there all the time.
        self.holds_incoming = True

    @property
    def plan(self) -> Plan | None:
        return self.made

    def begin_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.broken = False

    def end_call(self) -> None:
        """Nothing is watched."""

    def abandon_call(self) -> None:
        """Nothing is watched."""

    def is_under_way(self) -> bool:
        return False

    def forget_plans(self) -> None:
        """There is one plan for every step."""

    def choose(self, graph: AnyGraph, inputs: Sequence[Any]) -> Chosen:
        assert isinstance(graph, TracedGraph), "no size of a stage is left open"
        variant = graph.variant()
        if self.settings.stop_after_capture:
            raise CaptureReady("The stage is captured.")
        if self.program is not None and graph.number == 0:
            return Chosen(self.program, variant.absent)
        if self.made is not None and not self._warned:
            self._warned = True
            warnings.warn(
                "A stage of the pipeline was called in another way than it was planned for: with other shapes, or in "
                "several graphs; that runs unplanned, beyond the budget.",
                stacklevel=2,
            )
        return Chosen(variant.keep_all() if self.made is not None else variant.frugal(), variant.absent)

    def after_forward(self, saved: Saved, outputs: Sequence[Any]) -> None:
        if len(self.forwards) < len(self.micros):
            self.forwards[self.micros[len(self.forwards)]] = weakref.ref(saved)

    def before_backward(self, saved: Saved, tangents: Sequence[Any]) -> None:
        self.backwards.update(micro for micro, reference in self.forwards.items() if reference() is saved)

    def after_backward(self, saved: Saved) -> Callable[[Sequence[Any]], None] | None:
        return None

    def begin_step(self, micros: tuple[int, ...] = ()) -> None:
        """Micro-batches go forward in this order."""
        self.micros = micros
        self.forwards.clear()
        self.backwards.clear()

    def compute_early(self, micro: int, name: str) -> None:
        """Compute ahead what the backward of a micro-batch computes again first, if anything; profilers show a name."""
        saved = self.forwards[micro]() if micro in self.forwards else None
        if self.early is None or saved is None or saved.lowered is not self.program:
            return
        tensors, saved.tensors = list(saved.tensors), ()
        off = torch.autocast(self.owner.device().type, enabled=False)
        with torch.profiler.record_function(name), torch.no_grad(), off:
            saved.tensors = self.early.begin(tensors)
        saved.lowered = self.early.rest


def stage_module(module: nn.Module, owner: ResidentMemory) -> tuple[nn.Module, StageSession, Runner]:
    """The module to take the place of a stage's own, which shares its parameters, and what decides what it runs."""
    session = StageSession(Settings(None, show_progress=False), owner)
    copied = shallow_copy(module)
    owner.meet_optimized(copied)
    runner = Runner(plain_call(copied), lambda root: SessionBackend(EagerKernels(session), root))
    replace_call(copied, runner)
    return copied, session, runner


def captured_stage(
    session: StageSession, runner: Runner, args: Sequence[Any], kwargs: dict[str, Any], name: str
) -> Variant:
    """Trace a stage for a micro-batch, unless it was; it does not run."""
    session.settings = replace(session.settings, stop_after_capture=True)
    try:
        if not session.graphs:
            with suppress(CaptureReady), torch.enable_grad():
                runner(*args, **kwargs)
    finally:
        session.settings = replace(session.settings, stop_after_capture=False)
    if len(session.graphs) != 1:
        raise CaptureError(
            f"{name} is {len(session.graphs)} graphs, and a stage is planned as one; TORCH_LOGS=graph_breaks tells "
            "what breaks it: leave that out, or the pipeline unplanned."
        )
    return session.graphs[0].variant()
