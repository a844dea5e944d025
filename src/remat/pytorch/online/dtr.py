"""`dtr`: plain eager PyTorch within a byte budget, by giving up what autograd saved and computing it again.

    with remat.dtr("2GiB") as online:
        loss = model(batch)
        loss.backward()

In: a budget for what the ops inside make: activations, gradients, temporaries. Nothing is captured, so any Python
works: control flow that depends on data, custom autograd functions, trees. Autograd's saved tensors become handles, and
a handle that is read computes its tensor again where its memory was given up. When the context ends, nothing of it
stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch.autograd.graph import saved_tensors_hooks

from remat.core.budget import Budget, BudgetUnit, parse_budget
from remat.core.problem import Problem
from remat.core.schedule import plain_schedule
from remat.core.simulate import simulate
from remat.errors import BudgetError, RematError
from remat.pytorch.device import total_bytes
from remat.pytorch.online.memory import Memory
from remat.pytorch.online.recorder import OnlineRecorder, can_follow
from remat.pytorch.online.trace import Hindsight, Trace
from remat.pytorch.online.values import Handle, Value


class Online:
    """The context: what it may use, what it has done, and what it could have done."""

    def __init__(self, budget_bytes: int) -> None:
        self.memory, self.trace = Memory(budget_bytes), Trace()
        self._recorder = OnlineRecorder(self.memory, self.trace)
        self._stack: ExitStack | None = None
        self._handles = 0
        self._outputs: list[int] = []

    @property
    def budget_bytes(self) -> int:
        return self.memory.budget_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that what ops made has taken."""
        return self.memory.peak_bytes

    @property
    def evictions(self) -> int:
        return self.memory.evictions

    @property
    def recomputations(self) -> int:
        """Ops that ran again."""
        return self.memory.recomputations

    def __enter__(self) -> Self:
        if self._stack is not None:
            raise RematError("This context of remat.dtr is in use already; make another one for each step.")
        self._stack = ExitStack()
        self._stack.enter_context(self._recorder)
        self._stack.enter_context(saved_tensors_hooks(self._pack, self._unpack))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._stack is not None, "it was entered"
        stack, self._stack = self._stack, None
        stack.__exit__(kind, error, trace)
        self._outputs = [number for _, value in self.memory.values.items() for number in value.reads]
        if not self._handles:
            self._forget()

    def _pack(self, tensor: torch.Tensor) -> Any:
        if not can_follow(tensor):
            return tensor
        value = self._recorder.value_of(tensor)
        self._handles += 1
        handle = Handle(value, tensor, self._dropped)
        self.memory.keep(value, tensor.untyped_storage())
        return handle

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, Handle):
            return packed
        with self._busy():
            return packed.geometry.tensor(self.memory.fetch(packed.value))

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """What runs meanwhile is no op of the step."""
        before, self._recorder.is_busy = self._recorder.is_busy, True
        try:
            yield
        finally:
            self._recorder.is_busy = before

    def _dropped(self, value: Value) -> None:
        """Autograd has no more use for a saved tensor; without any, nothing has to be computed again."""
        self._handles -= 1
        if not value.handles:
            self.memory.forget(value)
            value.release()
        if not self._handles:
            self._forget()

    def _forget(self) -> None:
        for _, value in list(self.memory.values.items()):
            value.made = None
            value.readers.clear()

    def problem(self) -> Problem:
        """The ops of this context as a problem for Remat's solvers, within the same budget."""
        if self._stack is not None:
            raise RematError("The trace of remat.dtr is complete when its context has ended; ask after it.")
        if not self.trace.ops:
            raise RematError("No op ran in this context of remat.dtr, so there is no trace to solve.")
        return self.trace.problem(self.budget_bytes, self._outputs)

    def hindsight(self, solver: str = "auto", *, time_limit: float = 10.0, seed: int = 0) -> Hindsight:
        """How far above the best schedule for the same ops this was, with the memory that it really took."""
        from remat.solvers import solve

        problem = self.problem()
        problem = problem.with_budget(max(self.budget_bytes, self.peak_bytes))
        plain = simulate(problem, plain_schedule(problem.graph)).time_ns
        solution = solve(problem, solver, time_limit_s=time_limit, seed=seed)
        return Hindsight(plain + self.memory.again_ns, plain, problem.budget_bytes, solution)


def dtr(budget: str | int | float | Budget) -> Online:
    """A context in which what ops make stays within `budget`: bytes, "2GiB", or "10%" of the device.

    Of what ops make inside, tensors that autograd saved are given up when room is needed and computed again when
    backward reads them; gradients are the same, bit for bit. Run one step's forward and backward inside.
    """
    parsed = parse_budget(budget)
    if parsed.unit is BudgetUnit.PLAIN_FRACTION:
        raise BudgetError(
            f"remat.dtr cannot know the peak that the budget {budget!r} is a share of before it runs; give bytes, or a "
            "share of the device."
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Online(parsed.resolve(plain_peak_bytes=0, device_bytes=total_bytes(device)))
