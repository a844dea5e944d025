"""How long each kernel of compiled code takes, found before the step runs.

In: calls of kernels as a dry run sees them, and the code that holds the kernels. Out: nanoseconds of each distinct
call. Kernels run on made-up tensors of the same looks, one at a time, so little memory is needed. Inductor tunes a
kernel when it first runs, which then happens here and not at the step's peak.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remat.core.results.profile import Phase
from remat.inductor._compat.compiling import loaded_code, run_kernel
from remat.inductor.dry_run.compiled import Compiled
from remat.inductor.kernels.text import KernelText, read_kernels
from remat.pytorch._compat.modes import without_autocast, without_modes
from remat.pytorch.costs.op_costs import call_key, clock_of, usual_ns
from remat.pytorch.costs.turns import measuring_alone
from remat.pytorch.device import generator_indices
from remat.pytorch.graph.real_results import REFUSALS

GENERATED = "triton_"
"""How the names of kernels that Inductor generates for a GPU begin."""


@dataclass(frozen=True, slots=True)
class Looks:
    """Of a tensor, which itself is let go: a dry run frees what nobody holds."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def size_bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def made_up(self) -> torch.Tensor:
        """Zeros: a seed or an index of 0 is always there."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).zero_()


@dataclass(slots=True)
class SeenCall:
    """A kernel call of a dry run."""

    name: str
    args: Sequence[Any]
    """`Looks` in the place of tensors."""
    times: int = 0
    """How often a step makes it."""

    @property
    def tensors(self) -> list[Looks]:
        return [item for item in self.args if isinstance(item, Looks)]


class SeenCalls:
    """Notes the calls of generated kernels in a dry run; a name stands for another kernel in each half."""

    def __init__(self) -> None:
        self._found: dict[Phase, dict[str, SeenCall]] = {Phase.FORWARD: {}, Phase.BACKWARD: {}}

    def note(self, phase: Phase, name: str, args: Sequence[Any]) -> None:
        if name.startswith(GENERATED):
            key = call_key(name, args, {})
            call = self._found[phase].setdefault(key, SeenCall(name, [_looks(item) for item in args]))
            call.times += 1

    def of(self, phase: Phase) -> list[SeenCall]:
        return list(self._found[phase].values())


@dataclass(frozen=True, slots=True)
class TimedKernel:
    text: KernelText
    time_ns: float
    times: int
    """How often a step calls it."""
    moved_bytes: int
    """What it reads and writes."""


@dataclass(frozen=True, slots=True)
class TimedKernels:
    kernels: tuple[TimedKernel, ...] = ()
    untimed: tuple[SeenCall, ...] = ()
    """What could not run on made-up tensors."""

    def and_(self, other: TimedKernels) -> TimedKernels:
        return TimedKernels((*self.kernels, *other.kernels), (*self.untimed, *other.untimed))


def time_kernels(compiled: Compiled, calls: Sequence[SeenCall], device: torch.device, most_bytes: int) -> TimedKernels:
    """Those that can run on made-up tensors within `most_bytes` beyond what is there."""
    code, texts = loaded_code(compiled.code_key), read_kernels(compiled.source)
    clock = clock_of(device)
    found: list[TimedKernel] = []
    untimed: list[SeenCall] = []
    with (
        measuring_alone(device),
        torch.no_grad(),
        without_modes(),
        without_autocast(),
        torch.random.fork_rng(generator_indices(device)),
    ):
        for call in calls:
            text = texts.get(call.name)
            is_there = text is not None and call.name in code and _can_run(call, text, most_bytes)
            time_ns = _time_ns(code, call, clock) if is_there else None
            if text is None or time_ns is None:
                untimed.append(call)
            else:
                found.append(TimedKernel(text, time_ns, call.times, _moved_bytes(call, text)))
    return TimedKernels(tuple(found), tuple(untimed))


def _time_ns(code: Mapping[str, Any], call: SeenCall, clock: Callable[[Callable[[], Any]], float]) -> float | None:
    """None where the kernel does not take what was made up for it."""
    args = [item.made_up() if isinstance(item, Looks) else item for item in call.args]
    try:
        run_kernel(code[call.name], args)
        return usual_ns(lambda: run_kernel(code[call.name], args), clock)
    except REFUSALS:
        return None


def _can_run(call: SeenCall, text: KernelText, most_bytes: int) -> bool:
    needed = sum(item.size_bytes for item in call.tensors)
    return not (text.goes_by_index or text.counts_blocks) and needed <= most_bytes


def _moved_bytes(call: SeenCall, text: KernelText) -> int:
    return sum(item.size_bytes * (2 if place < text.in_place else 1) for place, item in enumerate(call.tensors))


def _looks(item: Any) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    return Looks(tuple(item.shape), tuple(item.stride()), item.dtype, item.device)
