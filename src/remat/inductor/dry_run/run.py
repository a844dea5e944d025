"""The memory of a compiled step without running it: Inductor's wrapper code is gone through on fake tensors.

In: a forward and its backward as Inductor compiled them (`Compiled`). Out: a `KernelTimeline`. The wrapper's own code
runs (`wrapper.py`), so allocations, reuse in place and `del` happen exactly as they will; kernels do nothing; fallback
ops run on fake tensors. Storages are followed to their death (`storages.py`). Saved tensors pass from forward to
backward as they do in AOTAutograd: only the boxed argument list holds them.

What kernels of libraries allocate for themselves is not in the code; `workspace_of` may tell (`workspaces.py`).
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from remat.core.caching_allocator import slack_of_events
from remat.core.results.profile import Phase
from remat.inductor.dry_run.compiled import Compiled, saved_outputs
from remat.inductor.dry_run.storages import DryRunStorages, Place, Storage
from remat.inductor.dry_run.timeline import BufferLife, CannotFollow, KernelBuffer, KernelCall, KernelTimeline
from remat.inductor.dry_run.wrapper import Wrapper, read_wrapper
from remat.pytorch._compat.fakes import FakeTensorMode
from remat.pytorch._compat.modes import DispatchMode, HigherOrderOperator
from remat.pytorch._compat.trees import tree_leaves
from remat.pytorch.graph.nodes import returns_views

WorkspaceOf = Callable[[str, Sequence[Any], Mapping[str, Any]], int]
"""From a call's name, arguments and keyword arguments to the bytes that it needs while it runs."""
OnCall = Callable[[Phase, str, Sequence[Any]], None]
"""Told of each call; it must not hold the arguments."""

_AUTOGRAD = "autograd"


def no_workspace(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    return 0


def tell_nobody(phase: Phase, name: str, args: Sequence[Any]) -> None:
    """In place of who would want to know."""


def dry_run(
    forward: Compiled,
    backward: Compiled | None = None,
    *,
    device: torch.device,
    resident_bytes: int = 0,
    kept: Collection[int] | None = None,
    workspace_of: WorkspaceOf = no_workspace,
    on_call: OnCall = tell_nobody,
) -> KernelTimeline:
    """Forward, then backward. `resident_bytes` is what the caller holds all the time: parameters, buffers, inputs.

    `kept` are the places of forward's outputs that the caller holds until backward is over: by default all that are
    not only saved for backward.
    """
    run = DryRun(device, resident_bytes=resident_bytes, workspace_of=workspace_of, on_call=on_call)
    inputs = run.given(forward.inputs)
    outputs = run.forward(forward, inputs)
    if backward is None:
        run.end_forward()
        return run.timeline()
    saved = saved_outputs(forward, backward)
    visible = len(outputs) - len([place for place in saved if place is not None])
    held = [outputs[place] for place in (range(visible) if kept is None else kept)]
    args = [None if place is None else outputs[place] for place in saved]
    del outputs
    run.end_forward()
    gradients = run.backward(backward, args)
    timeline = run.timeline()
    del held, gradients
    return timeline


class DryRun:
    """One step under way: forwards in their order, then backwards; what the caller holds, the caller must hold."""

    def __init__(
        self,
        device: torch.device,
        *,
        resident_bytes: int = 0,
        workspace_of: WorkspaceOf = no_workspace,
        on_call: OnCall = tell_nobody,
    ) -> None:
        self._device = device
        self._resident = resident_bytes
        self._workspace_of = workspace_of
        self._on_call = on_call
        self._mode = FakeTensorMode()
        self._storages = DryRunStorages(device)
        self._wrappers: dict[str, Wrapper] = {}
        self._phase = Phase.FORWARD
        self._calls: list[KernelCall] = []
        self._moments: list[int] = []
        self._count = 0
        """Storages that there were at the last call."""
        self._boundary = 0

    def given(self, inputs: Sequence[Any]) -> list[Any]:
        """Stand-ins of what is in memory already; they cost nothing."""
        made = [self._like(item) for item in inputs]
        for item in made:
            if isinstance(item, torch.Tensor):
                self._storages.forgive(item)
        return made

    def tangent(self, like: Any, name: str) -> Any:
        """A gradient that autograd allocates."""
        made = self._like(like)
        if isinstance(made, torch.Tensor):
            self._storages.meet(made, Phase.BACKWARD, lambda: Place("", "", name))
        return made

    def forward(self, compiled: Compiled, args: list[Any]) -> tuple[Any, ...]:
        """Its outputs; `args` are the caller's and stay as they are."""
        return self._run(compiled, list(args), Phase.FORWARD)

    def end_forward(self) -> None:
        """Everything that the caller did not keep is gone."""
        self._boundary = self._storages.live_bytes

    def backward(self, compiled: Compiled, args: list[Any]) -> tuple[Any, ...]:
        """Its gradients; `args` is emptied, and a None in it is a gradient that autograd makes, or no tensor."""
        boxed = [
            self.tangent(like, name) if arg is None else arg
            for arg, like, name in zip(args, compiled.inputs, compiled.input_names, strict=True)
        ]
        # `loss.backward()` holds the one that it begins with; autograd drops those that come from further on.
        held = [boxed[place] for place, arg in enumerate(args) if arg is None and _is_scalar(boxed[place])]
        args.clear()
        gradients = self._run(compiled, boxed, Phase.BACKWARD)
        del held
        return gradients

    def timeline(self) -> KernelTimeline:
        peak = max(range(len(self._calls)), key=lambda place: self._calls[place].live_bytes, default=-1)
        if peak < 0:
            raise CannotFollow("The compiled code calls no kernel; there is no peak to tell.")
        return KernelTimeline(
            calls=tuple(self._calls),
            peak_bytes=self._calls[peak].live_bytes,
            peak_call=peak,
            resident_bytes=self._resident,
            boundary_bytes=self._resident + self._boundary,
            end_bytes=self._resident + self._storages.live_bytes,
            slack_bytes=self._slack(),
            alive=self._alive_at(peak),
            lives=tuple(self._lives()),
        )

    def _lives(self) -> Iterator[BufferLife]:
        for item in self._storages.all:
            created = bisect_left(self._moments, item.allocated)
            freed = len(self._calls) if item.freed is None else bisect_left(self._moments, item.freed) - 1
            if created <= freed and created < len(self._calls):
                yield BufferLife(item.size_bytes, created, freed, self._calls[created].name)

    def _like(self, item: Any) -> Any:
        """A tensor of this run; what is no tensor stays, symbolic numbers become what they were traced with."""
        if not isinstance(item, torch.Tensor):
            return item if not isinstance(item, torch.SymInt) else _number(item)
        size, stride = [_number(length) for length in item.shape], [_number(step) for step in item.stride()]
        with self._mode, torch.no_grad():
            return torch.empty_strided(size, stride, dtype=item.dtype, device=item.device)

    def _run(self, compiled: Compiled, args: list[Any], phase: Phase) -> tuple[Any, ...]:
        wrapper = read_wrapper(compiled.source)
        self._wrappers[wrapper.file] = wrapper
        self._phase = phase
        self._hand_over(wrapper, args)
        names = list(compiled.constants)
        constants = dict(zip(names, self.given([compiled.constants[name] for name in names]), strict=True))
        call = wrapper.call_in(self._note, constants)
        with self._watching(wrapper):
            return tuple(call(args))

    def _hand_over(self, wrapper: Wrapper, args: Sequence[Any]) -> None:
        parameters = wrapper.variables.parameters
        if len(parameters) != len(args):
            raise CannotFollow(f"The compiled code takes {len(parameters)} arguments, the graph {len(args)}.")
        for name, arg in zip(parameters, args, strict=True):
            storage = self._storages.find(arg) if isinstance(arg, torch.Tensor) else None
            if storage is not None:
                storage.held = Place(wrapper.file, "call", name)

    @contextmanager
    def _watching(self, wrapper: Wrapper) -> Iterator[None]:
        with ExitStack() as stack:
            for context in (torch.no_grad(), self._mode, _Watch(self)):
                stack.enter_context(context)
            try:
                yield
            except CannotFollow as error:
                raise CannotFollow(f"{error} ({_where(wrapper, error)})") from error
            except Exception as error:
                raise CannotFollow(
                    f"The compiled code cannot be followed without computing: {error!r} ({_where(wrapper, error)})."
                ) from error

    def _note(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A kernel is called; what it writes to is there."""
        frame = self._frame()
        wrapper = self._wrappers[frame.f_code.co_filename]
        workspace = self._workspace_of(name, args, kwargs)
        made = sum(item.size_bytes for item in self._storages.all[self._count :] if item.freed is None)
        self._count = len(self._storages.all)
        call = KernelCall(
            name=name,
            phase=self._phase,
            line=frame.f_lineno,
            origins=wrapper.variables.origins.get((frame.f_code.co_name, frame.f_lineno), ()),
            made_bytes=made,
            workspace_bytes=workspace,
            live_bytes=self._resident + max(self._storages.take_high(), self._storages.live_bytes + workspace),
        )
        self._calls.append(call)
        self._on_call(self._phase, name, args)
        self._moments.append(self._storages.moment)

    def met(self, op: Any, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """An op of torch has run on fake tensors."""
        several = isinstance(result, tuple | list)
        for index, item in enumerate(tree_leaves(result)):
            if isinstance(item, torch.Tensor):
                self._storages.meet(item, self._phase, partial(self._place, index if several else None))
        if not _only_looks(op):
            self._note(str(op), args, kwargs)

    def _place(self, index: int | None) -> Place:
        frame = self._frame()
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        name = self._wrappers[file].variables.targets.get((function, frame.f_lineno), "")
        return Place(file, function, name if index is None else f"{name}[{index}]")

    def _frame(self) -> Any:
        """The innermost frame of the wrapper's code."""
        frame: Any = sys._getframe(1)
        while frame.f_code.co_filename not in self._wrappers:
            frame = frame.f_back
        return frame

    def _alive_at(self, place: int) -> tuple[KernelBuffer, ...]:
        moment, call = self._moments[place], self._calls[place]
        alive = [
            self._describe(item, call)
            for item in self._storages.all
            if item.allocated <= moment and (item.freed is None or item.freed > moment)
        ]
        return tuple(sorted(alive, key=lambda buffer: -buffer.size_bytes))

    def _describe(self, item: Storage, call: KernelCall) -> KernelBuffer:
        """Its name at the peak; a storage that was given to backward and reused there is backward's."""
        place = item.born
        if place.file == "":
            return KernelBuffer(place.name, item.size_bytes, item.phase, _AUTOGRAD, ())
        variables = self._wrappers[place.file].variables
        # What is still called as in forward when backward begins was made there.
        is_over = call.phase is not item.phase
        name = variables.name_at(place.function, place.name, float("inf") if is_over else call.line)
        maker = variables.maker(place.function, name)
        if item.held != item.born and is_over:
            given, variables = item.held, self._wrappers[item.held.file].variables
            name = variables.name_at(given.function, given.name, call.line)
            maker = maker if name == given.name else variables.maker(given.function, name)
        return KernelBuffer(name, item.size_bytes, item.phase, maker.call, maker.origins)

    def _slack(self) -> int:
        if self._device.type != "cuda":
            return 0
        events = self._storages.events()
        return slack_of_events([(id(item), item.size_bytes, item.freed == moment) for moment, item in events])

    def answer(self, tensor: torch.Tensor) -> bool:
        """A value of a tensor: nobody knows it, but an assertion that nothing is NaN is meant to hold."""
        frame = self._frame()
        if not self._wrappers[frame.f_code.co_filename].line(frame.f_lineno).startswith("assert not "):
            raise CannotFollow("The compiled code depends on the value of a tensor; measure the step instead.")
        return False


class _Watch(DispatchMode):
    """Sees every op of torch that the code calls, above the mode that makes tensors fake."""

    def __init__(self, run: DryRun) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(op, HigherOrderOperator):
            return self.run_within(op, args, kwargs)
        if op is torch.ops.aten._local_scalar_dense.default:
            return self._run.answer(args[0])
        result = op(*args, **kwargs)
        if op.namespace == "prim":
            # A fake tensor was asked for its device.
            return result
        self._run.met(op, result, args, kwargs)
        return result


def _only_looks(op: Any) -> bool:
    """Whether an op makes room or looks at it, without computing."""
    return op in _ROOM or returns_views(op)


_ROOM = (
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty.memory_format,
)


def _is_scalar(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dim() == 0


def _number(value: Any) -> int:
    """What a symbolic size was when the graph was traced."""
    if isinstance(value, torch.SymInt):
        value = value.node.hint
    if value is None:
        raise CannotFollow("A size of the graph is not known before the step runs; measure the step instead.")
    return int(value)


def _where(wrapper: Wrapper, error: BaseException) -> str:
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == wrapper.file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"line {line} of the compiled code: `{wrapper.line(line)[:200]}`"
