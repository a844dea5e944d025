"""Follows one training step op by op: which storages come and go, what they are, where and when they are used.

In: a ledger (where bytes come from), a clock (where times come from), and what the step can reach. While a `Follower`
follows, every op of the step passes through it, whether its tensors are real or fake. Out: a `StepProfile`.

    follower = Follower(ledger, clock, models)
    follower.expect(reachable_from(step))
    with follower.following():
        step()
    profile = follower.profile("name", device, seconds)

Views are no ops here: they neither compute nor allocate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from remat.core.results.profile import BEFORE, MemoryClass, Phase, ProfiledOp, ProfiledStorage, StepProfile
from remat.pytorch._compat.engine import unwatch_engine, watch_engine
from remat.pytorch._compat.memory import profiler_is_running
from remat.pytorch._compat.modes import DispatchMode, HigherOrderOperator
from remat.pytorch._compat.tensors import schema_of
from remat.pytorch.measure.clocks import Clock, clock_of
from remat.pytorch.measure.cpu_ledger import CpuLedger
from remat.pytorch.measure.ledger import Account, CudaLedger, Ledger, Span, StorageLedger
from remat.pytorch.measure.module_paths import ModulePaths
from remat.pytorch.measure.optimizer_steps import unwatch_optimizers, watch_optimizers
from remat.pytorch.measure.phases import Phases
from remat.pytorch.measure.storages import Followed, FollowedStorages
from remat.pytorch.reach import Reachable, tensors_within

_EMPTY = ("aten.empty", "aten.new_empty")
"""Ops that only allocate; what they make is named after the op that fills it."""
_NO_COMPUTATION = frozenset({"prim", "profiler"})
"""Namespaces of ops that ask or note something; one tells the device of a fake tensor."""


@dataclass(slots=True)
class _Op:
    target: str
    module: str
    phase: Phase


class Follower(DispatchMode):
    """One step's worth of following."""

    def __init__(self, ledger: Ledger, clock: Clock, models: Iterable[nn.Module] = ()) -> None:
        super().__init__()
        self._ledger, self._clock = ledger, clock
        self._paths = ModulePaths(models)
        self._phases = Phases()
        self._storages = FollowedStorages(ledger)
        self._ops: list[_Op] = []
        self._parameters: dict[int, torch.Tensor] = {}
        self._hooks: list[Any] = []
        self._failure: tuple[BaseException, str, str | None] | None = None

    def expect(self, found: Reachable) -> None:
        """What is there before the step begins, class by class."""
        for name, members in found.tensors.items():
            for tensor in members.values():
                self._storages.meet(tensor, MemoryClass(name), name=name.removesuffix("s"))
        self._parameters |= {id(tensor): tensor for tensor in found.parameters.values()}
        self._mark_members()
        self._mark_gradients()

    def expect_survivors(self, before: Follower) -> None:
        """What is left of an earlier step, as outputs that are held until they are replaced."""
        for item in before._storages:
            self._storages.adopt(item)

    def models(self) -> list[nn.Module]:
        """The models that were called or given."""
        return self._paths.models()

    @contextmanager
    def following(self) -> Iterator[None]:
        """While this lasts, the step runs in this thread; what it raises is passed on."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def start(self, entered: nn.Module | None = None) -> None:
        """Begin, in the forward of `entered` where it has begun already."""
        self._hooks = self._paths.watch(self._phases.computes, entered)
        watch_optimizers(self)
        watch_engine(self)
        self._ledger.start()
        self.__enter__()

    def stop(self) -> None:
        self.__exit__(None, None, None)
        self._ledger.stop()
        unwatch_engine(self)
        unwatch_optimizers(self)
        for hook in self._hooks:
            hook.remove()
        self._settle()
        self._mark_gradients()
        self._mark_members()
        self._storages.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self.run_within(func, args, kwargs)
        if self._paths.note_nodes():
            self._phases.computes()
        if func.is_view or func.namespace in _NO_COMPUTATION:
            return func(*args, **kwargs)
        module = self._paths.in_backward() if self._phases.in_engine else self._paths.in_forward()
        op = _Op(str(func), module, self._phase())
        self._ops.append(op)
        self._storages.op += 1
        written = [args[place] for place in written_arguments(func) if place < len(args)]
        for tensor in tensors_within((args, kwargs)):
            self._use(tensor, op)
        for tensor in tensors_within(written):
            self._write(tensor)
        result = self._run(op, func, args, kwargs)
        for tensor in tensors_within(result):
            if self._storages.known(tensor) is None:
                kind = self._kind_of_result(op)
                item = self._storages.meet(tensor, kind, name=op.target, module=module, is_result=True)
                if item is not None:
                    item.writers.append(self._storages.op)
        return result

    def _phase(self) -> Phase:
        # A module's forward while the engine runs: a checkpointed region computes again what it dropped.
        runs_again = self._phases.now is Phase.BACKWARD and self._paths.is_inside()
        return Phase.RECOMPUTE if runs_again else self._phases.now

    def _kind_of_result(self, op: _Op) -> MemoryClass:
        """A first guess; what becomes a gradient, a buffer or an optimizer's state is claimed later."""
        if op.phase is Phase.OPTIMIZER:
            return MemoryClass.WORKSPACE
        loads = op.phase is Phase.FORWARD and not self._phases.is_computing
        return MemoryClass.INPUT if loads else MemoryClass.ACTIVATION

    def _run(self, op: _Op, func: Any, args: Any, kwargs: Any) -> Any:
        result = None
        self._storages.inside_op = True
        self._ledger.begin()
        self._clock.begin()
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            self._failure = (error, op.target, op.module if op.module or self._paths.is_inside() else None)
            raise
        finally:
            self._clock.end(func, args, kwargs, result)
            self._ledger.end()
            self._storages.inside_op = False
        return result

    def _use(self, tensor: torch.Tensor, op: _Op) -> None:
        item = self._storages.known(tensor) or self._meet_argument(tensor)
        if item is None:
            return
        if op.phase is Phase.FORWARD and not self._phases.is_loose:
            item.last_forward_use = self._storages.op
        elif self._phases.now is Phase.BACKWARD and item.first_backward_use == BEFORE and self._is_older(item):
            item.first_backward_use = self._storages.op

    def _write(self, tensor: torch.Tensor) -> None:
        """An op in place is part of what making the storage once more would take."""
        item = self._storages.known(tensor)
        if item is not None and item.seen.is_result and self._phases.now is Phase.FORWARD:
            item.writers.append(self._storages.op)
            if item.name.startswith(_EMPTY):
                item.name = self._ops[-1].target

    def _is_older(self, item: Followed) -> bool:
        """Whether backward found the storage there; what it makes itself does not wait for it."""
        return not item.seen.is_result or self._ops[item.seen.first_op].phase is Phase.FORWARD

    def _meet_argument(self, tensor: torch.Tensor) -> Followed | None:
        """A storage that no op made and nobody spoke of."""
        if isinstance(tensor, nn.Parameter):
            return self._storages.meet(tensor, MemoryClass.PARAMETER, name="parameter")
        kind = MemoryClass.OTHER if self._phases.is_computing else MemoryClass.INPUT
        return self._storages.meet(tensor, kind, name="input")

    def engine_began(self, roots: Sequence[torch.Tensor]) -> None:
        self._paths.engine_began()
        self._phases.engine_began()

    def engine_returned(self) -> None:
        self._paths.engine_returned()
        self._phases.engine_returned(len(self._ops))
        self._mark_gradients()

    def optimizer_began(self, optimizer: Optimizer) -> None:
        self._settle()
        self._phases.optimizer_began()
        for group in optimizer.param_groups:
            self._parameters |= {id(parameter): parameter for parameter in group["params"]}
        self._mark_gradients()

    def optimizer_returned(self, optimizer: Optimizer) -> None:
        self._phases.optimizer_returned(len(self._ops))
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    self._become(value, MemoryClass.OPTIMIZER_STATE, f"{key} of ", parameter)

    def _settle(self) -> None:
        position = self._phases.settle()
        for op in self._ops[position:] if position is not None else ():
            op.phase = Phase.OPTIMIZER

    def _mark_gradients(self) -> None:
        for parameter in (*self._parameters.values(), *self._paths.leaves.values()):
            if parameter.grad is not None:
                self._become(parameter.grad, MemoryClass.GRADIENT, "gradient of ", parameter)

    def _mark_members(self) -> None:
        """Names of parameters and buffers, also of those that the step made itself."""
        for module, path in self._paths.modules():
            for name, tensor in module.named_buffers(recurse=False):
                self._claim(tensor, MemoryClass.BUFFER, f"{path}.{name}".lstrip("."), path)
            for tensor in module.parameters(recurse=False):
                self._become(tensor, MemoryClass.PARAMETER, "", tensor)

    def _become(self, tensor: torch.Tensor, kind: MemoryClass, prefix: str, parameter: torch.Tensor) -> None:
        """What `tensor` lies in is of this class from birth, and named after a parameter."""
        path, name = self._paths.owner(parameter)
        self._claim(tensor, kind, f"{prefix}{name}", path)

    def _claim(self, tensor: torch.Tensor, kind: MemoryClass, name: str, module: str) -> None:
        item = self._storages.known(tensor)
        if item is not None:
            item.kind, item.name, item.module = kind, name, module

    @property
    def op_count(self) -> int:
        return len(self._ops)

    def failure(self, error: BaseException) -> tuple[str, str | None]:
        """The op and the module that `error` came out of; no op or module where it came from none."""
        if self._failure is not None and self._failure[0] is error:
            return self._failure[1:]
        return "", self._paths.raised_in(error)

    def profile(
        self, name: str, device: str, seconds: float, *, is_estimate: bool = False, stopped_by: str = ""
    ) -> StepProfile:
        """What was followed, once it is over."""
        times = self._clock.times_ns()
        account = self._ledger.account([item.seen for item in self._storages], len(self._ops))
        return StepProfile(
            name=name,
            device=device,
            torch_version=torch.__version__,
            ops=tuple(self._profiled_op(place, times[place], account) for place in range(len(self._ops))),
            storages=tuple(self._profiled_storages(times, account)),
            start_bytes=account.start_bytes,
            seconds=seconds,
            reserved_bytes=account.reserved_bytes,
            is_estimate=is_estimate,
            stopped_by=stopped_by,
        )

    def _profiled_op(self, place: int, time_ns: float, account: Account) -> ProfiledOp:
        op = self._ops[place]
        return ProfiledOp(
            target=op.target,
            module=op.module,
            phase=op.phase,
            time_ns=time_ns,
            allocated_bytes=account.allocated_bytes[place],
            freed_bytes=account.freed_bytes[place],
            workspace_bytes=account.workspace_bytes[place],
            live_bytes=account.live_bytes[place],
        )

    def _profiled_storages(self, times: list[float], account: Account) -> Iterator[ProfiledStorage]:
        for item, span in zip(self._storages, account.spans, strict=True):
            if span is not None:
                yield ProfiledStorage(
                    kind=self._kind(item, span),
                    size_bytes=span.size_bytes,
                    name=item.name,
                    module=item.module,
                    created=span.created,
                    freed=span.freed,
                    last_forward_use=item.last_forward_use,
                    first_backward_use=item.first_backward_use,
                    recompute_ns=sum(times[op] for op in item.writers),
                )
        for span in account.others:
            yield self._other(span)

    def _kind(self, item: Followed, span: Span) -> MemoryClass:
        made_here = item.kind in (MemoryClass.ACTIVATION, MemoryClass.INPUT) and item.seen.is_result
        if made_here and self._ops[item.seen.first_op].phase is Phase.OPTIMIZER:
            return MemoryClass.WORKSPACE
        if made_here and not self._phases.has_computed:
            # A function without a model or a gradient does not load data, it computes.
            return MemoryClass.ACTIVATION
        if item.kind is MemoryClass.OTHER and span.created == BEFORE:
            # The model was given it; what Python makes for itself on the way stays `other`.
            return MemoryClass.INPUT
        return item.kind

    def _other(self, span: Span) -> ProfiledStorage:
        op = self._ops[span.created] if span.created != BEFORE else _Op("not followed", "", Phase.FORWARD)
        return ProfiledStorage(MemoryClass.OTHER, span.size_bytes, op.target, op.module, span.created, span.freed)


def ledger_of(device: torch.device) -> Ledger:
    """The best one there is for real tensors on `device`."""
    if device.type == "cuda":
        return CudaLedger(device)
    # There can be only one profiler; where the user's own runs, the storages have to do.
    asks_profiler = device.type == "cpu" and not profiler_is_running()
    return CpuLedger(device) if asks_profiler else StorageLedger(device)


def follower_of(device: torch.device, models: Iterable[nn.Module] = ()) -> Follower:
    """For a real step on `device`."""
    return Follower(ledger_of(device), clock_of(device), models)


@cache
def written_arguments(func: Any) -> tuple[int, ...]:
    """Which arguments the op writes to."""
    arguments = schema_of(func).arguments
    return tuple(
        place
        for place, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
