"""One step under way, watched from outside its graphs.

In: what the session tells as the step runs. Out: what is resident in the step, and an `Outside` for its plan. A planned
step is only looked at for outputs that live longer than its plan takes them to. An unplanned one is measured too, from
its call to the end of backward, but only if every graph in it is known: capturing and measuring ops would be seen as
the caller's doing.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from remat.core.graph import ValueId
from remat.core.schedule import Schedule
from remat.pytorch._compat.engine import saved_for
from remat.pytorch._compat.tensors import is_plain
from remat.pytorch.costs.allocations import take_matmul_workspaces
from remat.pytorch.graph.capture import Captured
from remat.pytorch.resident.memory import ResidentMemory, Residents, blocks_of
from remat.pytorch.run.compose import BEFORE, Call, Outside
from remat.pytorch.run.watching.crossing_storages import Observer
from remat.pytorch.run.watching.gaps import Gap, settle
from remat.pytorch.run.watching.meter import Meter, Window

LET_GO_S = 0.005


class StepWatch:
    """Looks at one step at a time; `on_backward_end` is told when a measured step's backward is over."""

    def __init__(self, owner: ResidentMemory, on_backward_end: Callable[[], None]) -> None:
        self.is_measured = False
        self.observer = Observer(torch.device("cpu"))
        self._owner = owner
        self._on_backward_end = on_backward_end
        self._meter = Meter()
        self._windows: Sequence[Window] = ()
        self._given: dict[int, int] | None = None
        self._arguments: tuple[Sequence[Any], dict[str, Any]] | None = None
        """Of the call under way."""
        self._later: dict[int, tuple[int, int]] = {}
        """Addresses of storages that later calls of the step were given, or that its loss has saved, with their bytes
        and where those are.
        """
        self._later_bytes = 0
        """Of them, what was there before the step and no graph takes."""
        self._is_called = False
        """Whether the step is called through Remat, so that its start can be seen."""
        self._saw_start = False
        self._has_begun = False
        """Whether a graph has run since the step was last called."""
        self.is_backward = False
        """Whether a backward of the last step has begun."""
        self._device = torch.device("cpu")
        self._resident_bytes: dict[str, int] = {}
        self._start_bytes = 0
        """What the CUDA allocator had handed out when the first graph started."""
        self._collectives_hold = False
        """Whether collectives may hold buffers a little longer than they need them."""
        self._other_bytes = 0
        """The part of it that nobody known holds."""
        self._called_bytes = 0
        """What it had handed out when the step was called."""
        self._gathered_bytes = 0
        """What was allocated since then, where parameters are gathered from other ranks and freed again."""

    def begin_call(self, args: Sequence[Any], kwargs: dict[str, Any], *, prepare: Callable[[], bool]) -> None:
        """The step is called; `prepare` says whether to measure it, and gets everything ready for that."""
        self._is_called = True
        self._arguments = args, kwargs
        if self._meter.is_running:
            # A second call before backward belongs to the step under way.
            self._later |= self._owner.blocks_given(args, kwargs)
            return
        self._given, self._later, self._has_begun = None, {}, False
        if prepare():
            self._given = self._owner.given(args, kwargs)
            if self._owner.device().type == "cuda":
                if self._owner.is_sharded():
                    # Gradients of the last step that wait to be collected go before the first graph runs: they would
                    # hide as much of what is gathered meanwhile.
                    gc.collect()
                self._called_bytes = torch.cuda.memory_allocated(self._owner.device())
            self._meter.start(self._owner.device(), self._engine_began, self._engine_returned)

    def end_call(self) -> None:
        """The step has returned: what it was called with is nobody's business, nor what follows where no graph ran."""
        self._arguments = None
        if not self._has_begun:
            self.look_away()

    def begin_step(
        self, device: torch.device, held: Iterable[Any] = (), *, is_known: bool, can_measure: bool, again: bool = False
    ) -> None:
        """The step's first graph starts; a step that `is_known` has a plan and is not to be measured. `held` are what
        forwards saved whose results are kept beyond their step. `again` says that it is known but for its shape.
        """
        self.is_backward = False
        if self._meter.device_type not in ("", device.type):
            # The step's own tensors are elsewhere than what its graphs take.
            self._meter.stop()
            self._is_called = False
        self._saw_start = self._meter.is_running
        self.is_measured = can_measure and (self._saw_start or not self._is_called)
        if not self.is_measured:
            self._meter.stop()
        self.observer, self._later_bytes = Observer(device), 0
        if is_known and not self.is_measured:
            return
        self._look_at_what_is_there(device, held, again)

    def _look_at_what_is_there(self, device: torch.device, held: Iterable[Any], again: bool) -> None:
        if self._given is None and self._arguments is not None:
            self._given = self._owner.given(*self._arguments)
        if self._given is not None:
            self._given |= self._owner.given(held, {})
        residents = self._owner.residents(device, again=again)
        self.observer = Observer(device, residents.addresses, self._given)
        self._device = device
        self._collectives_hold = self._owner.in_flight_bytes(device) > 0
        self._resident_bytes = residents.bytes_by_class
        if device.type == "cuda":
            take_matmul_workspaces(device)
            before = self._other_bytes
            if not again:
                gc.collect()
            self._look_at_others(device, residents)
            if again and self._other_bytes > before + self._start_bytes // 100:
                # What only waits to be collected is nobody's, and would be reserved in every step to come.
                gc.collect()
                self._look_at_others(device, residents)

    def _look_at_others(self, device: torch.device, residents: Residents) -> None:
        self._start_bytes = torch.cuda.memory_allocated(device)
        self._gathered_bytes = self._since_call() if residents.gathered_bytes else 0
        self._other_bytes = self._start_bytes - residents.present_bytes - self._gathered_bytes

    def _since_call(self) -> int:
        """What was allocated from the call of the step to its first graph; nothing where nobody saw the call."""
        return max(0, self._start_bytes - self._called_bytes) if self._saw_start else 0

    def look_away(self) -> None:
        """Something unknown came up, or the step was left without a backward."""
        self._meter.stop()
        self.is_measured = False

    def before_forward(self, call: int, inputs: Sequence[Any]) -> None:
        self._has_begun = True
        self.observer.take_inputs(call, inputs)
        if self.is_measured and not self._meter.is_running:
            self._meter.start(self._device, self._engine_began, self._engine_returned)

    def end_gap(self) -> None:
        """A program of the step is about to start."""
        self._let_go()
        self._meter.mark()

    def _let_go(self) -> None:
        """While a step is measured, let threads of collectives let go of buffers that they are done with."""
        if self._meter.is_running and self._collectives_hold:
            time.sleep(LET_GO_S)

    def after_forward(self, call: int, captured: Captured, outputs: Sequence[Any]) -> None:
        self._meter.mark()
        self.observer.note_outputs(call, captured, outputs)

    def before_backward(self, tangents: Sequence[Any]) -> tuple[tuple[int, int, ValueId], ...]:
        """Which incoming gradients come straight from another graph; see `Call.passed_gradients`."""
        self._let_go()
        self._meter.mark()
        self.is_backward = True
        return self.observer.sources(tangents)

    def after_backward(self, call: int, captured: Captured, gradients: Sequence[Any]) -> None:
        self._meter.mark()
        self.observer.note_outputs(call, captured, gradients, backward=True)

    def left_without_backward(self) -> None:
        if not self.is_backward:
            self.look_away()

    def _engine_began(self, roots: Sequence[torch.Tensor]) -> None:
        """What a loss outside of the graphs has saved may have been there before the step: its targets."""
        # While a new graph is traced and followed, backwards run on tensors that stand for others.
        if self._device.type == "cpu" and all(map(is_plain, roots)):
            self._later |= blocks_of(filter(is_plain, saved_for(roots)), self._device)

    def _engine_returned(self) -> None:
        # The caller may have run a backward of something else, and a new graph is followed back while it is traced.
        if self.is_backward and self._has_begun:
            self._windows = self._meter.stop()
            if self._meter.allocated is not None:
                self.observer.know_what_was_made(self._meter.allocated)
                self._later_bytes = sum(
                    size
                    for address, (size, pointer) in self._later.items()
                    if pointer not in self._meter.allocated and not self.observer.counts(address)
                )
            self.is_measured = False
            # Somebody else may have ended the profiler; a later step will do.
            if self._windows:
                self._on_backward_end()

    def outside(self, calls: Sequence[Call], schedules: Sequence[Schedule]) -> Outside:
        """What the caller did in the measured step that has ended."""
        windows = self._windows
        start = windows[0].end_bytes if self._saw_start else self._start_bytes
        # Programs and gaps take turns.
        gaps = [Gap(gap.peak_bytes - start, gap.end_bytes - start) for gap in windows[1 + self._saw_start :: 2]]
        several = len(calls) > 1
        passed = [item for item in self.observer.passed(len(calls)) if several or item.born != BEFORE]
        before = self._before_bytes() if several else 0
        return settle(calls, passed, before, gaps[: self.observer.ordered_gaps(len(calls))], schedules)

    def resident_bytes(self, calls: int, *, is_whole_step: bool) -> dict[str, int]:
        """What is in memory for the whole step, by class."""
        observer = self.observer
        resident = {**self._resident_bytes, "inputs": observer.input_bytes}
        if self._device.type == "cuda":
            made = 0 if self._gathered_bytes else observer.made_bytes
            resident["other"] = max(0, self._other_bytes - observer.input_bytes - made)
        else:
            resident["inputs"] += observer.given_bytes + self._later_bytes
        if calls == 1:
            # One call has no place for what the step makes before it: it is taken to stay.
            resident["inputs"] += observer.made_bytes
            resident["outside"] = 0 if is_whole_step else max(0, self._before_bytes() - observer.made_bytes)
        return resident

    def total_bytes(self, *, is_whole_step: bool) -> int:
        """All that is in memory for the whole step, as far as its first call tells."""
        return sum(self.resident_bytes(1, is_whole_step=is_whole_step).values())

    def _before_bytes(self) -> int:
        """What the step had made and kept when its first graph started; on CUDA the rest of it counts as others'."""
        if self._device.type == "cuda":
            return max(self.observer.made_bytes, self._gathered_bytes)
        return self._windows[0].end_bytes if self._saw_start and self._windows else 0
