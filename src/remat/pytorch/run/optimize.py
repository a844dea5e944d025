"""`optimize`, `apply`, `plan` and `plan_of`: the step a user has, running under a plan.

A module comes back as a module of the same class that shares its parameters, buffers and children; a function comes
back as a function. Both are captured at their first call with gradients enabled; without gradients they run as before.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel

from remat.core.budget import Budget, parse_budget, parse_budget_scope
from remat.core.results.plan import Plan
from remat.distributed.agreement.members import agreement_for, introduce
from remat.errors import CaptureError, RematError
from remat.integrations.masks import masks_as_in_eager
from remat.pytorch._compat.checkpointed import run_checkpoints_as_eager
from remat.pytorch._compat.distributed import parallel_at_work, shallow_copy
from remat.pytorch._compat.dynamo import (
    breaks_counted,
    dynamo_settings,
    failures_noted,
    forget_code,
    recapture_reason,
    untraced,
)
from remat.pytorch._compat.modes import inside_function_transform, planned_under_modes
from remat.pytorch._compat.tensors import compiled_call, plain_call, replace_call, with_module
from remat.pytorch.host.shared import checked_place
from remat.pytorch.resident.memory import ResidentMemory
from remat.pytorch.run.backend import INDUCTOR, SessionBackend, make_backend
from remat.pytorch.run.called import result_is_dropped, root_function
from remat.pytorch.run.contract import StepSession
from remat.pytorch.run.session import Session
from remat.pytorch.run.settings import CaptureReady, PlanReady, Settings, parse_on_infeasible
from remat.pytorch.run.shapes.buckets import Bound
from remat.pytorch.run.shapes.declared import declare, outside_bounds, parse_bounds
from remat.pytorch.run.uncaptured import UncapturedSteps, wants_gradients

NOTHING_CAPTURED = (
    "No graph with gradients could be captured from this step, so there is nothing to plan; "
    "check that a parameter requires gradients and that torch.compile can trace the step."
)
FROM_NOW_ON = (
    " From its next call on it keeps to the budget as under remat.dtr: what autograd saves is given up where memory "
    "runs short, and computed again."
)
MANY_CAPTURES = 9
"""Captures of one step after which the user is told what changes."""


class _Weakly:
    """A backend for Dynamo, which keeps those it was given while the process runs: with all they hold of a model."""

    def __init__(self, backend: SessionBackend) -> None:
        self._backend = weakref.ref(backend)

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Any:
        backend = self._backend()
        if backend is None:
            run_checkpoints_as_eager(module)
            return module.forward
        return backend(module, inputs)


class Runner:
    """Calls the compiled step; the first calls capture and plan."""

    def __init__(self, step: Callable[..., Any], make: Callable[[str], SessionBackend]) -> None:
        self.__wrapped__ = step
        root = root_function(step)
        backend = make(root.__name__)
        self.session: StepSession = backend.session
        self._backend = backend
        self._compiled = torch.compile(root, backend=_Weakly(backend), dynamic=False)
        # Dynamo keeps what it compiled while the process runs, and with it the session.
        weakref.finalize(self, backend.session.owner.forget)
        weakref.finalize(self, forget_code, root.__code__)
        self._code = root.__code__
        self._has_peers = False
        """Whether it is known who trains together."""
        self._captures = 0
        """Calls in which something was captured."""
        self._turn = threading.RLock()
        self._uncaptured: UncapturedSteps | None = None
        """There where nothing of the step can be captured."""
        self._thread = 0
        """Which thread called last."""
        self._warned_of_threads = self._warned_of_transform = self._warned_of_bounds = False

    @functools.cached_property
    def _device(self) -> torch.device:
        return self.session.owner.device()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or self._is_transformed():
            return self.__wrapped__(*args, **kwargs)
        if self._uncaptured is not None:
            return self._uncaptured.run(self.__wrapped__, args, kwargs)
        if not self._turn.acquire(blocking=False):
            return self._call_unplanned(args, kwargs)
        try:
            if self._thread != threading.get_ident() and self.session.is_under_way():
                return self._call_unplanned(args, kwargs)
            self._thread = threading.get_ident()
            return self._call_planned(args, kwargs)
        finally:
            self._turn.release()

    def _is_transformed(self) -> bool:
        """Whether torch.func calls the step, on tensors that stand for others."""
        if not inside_function_transform():
            return False
        if not self._warned_of_transform:
            self._warned_of_transform = True
            warnings.warn(
                "This step is called inside a transform of torch.func (grad, vmap, …), so it runs unplanned there.",
                stacklevel=4,
            )
        return True

    def _call_unplanned(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A plan is for one step at a time; another thread's runs as it would without Remat."""
        if not self._warned_of_threads:
            self._warned_of_threads = True
            warnings.warn(
                "This step is called while another thread is in the middle of it, so it runs unplanned, beyond the "
                "budget; let one thread run it at a time, or give each thread a model that is optimized for itself.",
                stacklevel=3,
            )
        return self.__wrapped__(*args, **kwargs)

    def _call_planned(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not self._has_peers:
            self.session.agreement, self._has_peers = agreement_for(self.__wrapped__), True
            self.session.owner.meet_parallel(parallel_at_work())
        if self.session.plan is None and self._device.type == "cpu":
            self.session.owner.beside.look()
        if bounds := self.session.settings.bounds:
            self._declare(bounds, args, kwargs)
        self.session.begin_call(args, kwargs)
        breaks, graphs = breaks_counted(), len(self.session.graphs)
        with (
            dynamo_settings(self._device, leaves_open=self._leaves_open()),
            masks_as_in_eager(),
            planned_under_modes(),
            untraced(self.session.owner.optimizers_of_step()),
            self._backend.called(self.__wrapped__, args, kwargs),
            failures_noted() as failed,
        ):
            try:
                result = self._compiled(*args, **kwargs)
            except BaseException as error:
                self.session.abandon_call()
                self.session.agreement.leave(error)
                if failed:
                    # It fails in eager too, so tracing was not to blame: the next call is traced again.
                    forget_code(self._code)
                raise
        self.session.end_call()
        if not self.session.graphs:
            self.session.agreement.leave()
        self.session.left_out += len(failed)
        skipped = (reason for reason, count in breaks_counted().items() if count > breaks.get(reason, 0))
        self.session.note_skipped((*skipped, *failed))
        self._captures += self._captures == 0 or len(self.session.graphs) > graphs
        self._warn_of_captures(was_captured=len(self.session.graphs) > graphs, may_go_back=wants_gradients(result))
        return result

    def _declare(self, bounds: Sequence[Bound], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        declared = declare(bounds, args, kwargs, is_marked=self._leaves_open())
        self.session.settings = replace(self.session.settings, bounds=declared)
        if (wrong := outside_bounds(declared)) is None:
            return
        words = (
            f"This call has a {wrong.axis} of {wrong.size}, outside of the declared {wrong.least} to {wrong.most}; "
            "declare wider bounds in dynamic=, or change the batch."
        )
        if not self.session.graphs:
            raise RematError(words)
        if not self._warned_of_bounds:
            self._warned_of_bounds = True
            warnings.warn(words, stacklevel=5)

    def _leaves_open(self) -> bool:
        return isinstance(self.session, Session) and self.session.settings.leaves_open

    def _warn_of_captures(self, *, was_captured: bool, may_go_back: bool) -> None:
        """Say once that nothing could be captured, or that the same is captured again and again."""
        if self._captures == 1 and not self.session.graphs:
            self._captures += 1
            budget = self.session.settings.budget
            if may_go_back and budget is not None:
                self._uncaptured = UncapturedSteps(budget, self.session.owner)
            if not self.session.left_out:
                warnings.warn(
                    "Nothing of this step could be captured, so it runs unplanned; TORCH_LOGS=graph_breaks tells why."
                    + (FROM_NOW_ON if self._uncaptured is not None else ""),
                    stacklevel=4,
                )
        elif self._captures == MANY_CAPTURES and was_captured:
            warnings.warn(
                f"This step was captured and planned {MANY_CAPTURES} times, and will be for every new shape or number: "
                f"{recapture_reason(self._code)}. Each time takes seconds; give batches one of a few shapes, and "
                "numbers that change as tensors.",
                stacklevel=4,
            )


def optimize(
    step: Any,
    budget: str | int | float | Budget,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    solver: str = "auto",
    time_limit: float = 10.0,
    seed: int = 0,
    count: str = "live",
    compiler: str | None = None,
    mode: str | None = None,
    search: float = 0.0,
    progress: bool | None = None,
    on_infeasible: str = "go on",
    offload: str | None = None,
    dynamic: Mapping[str, tuple[int, int]] | bool = True,
) -> Any:
    """The same step within `budget`: bytes, "8GiB", "80%" of the device or "0.5x" of the plain peak.

    `optimizer` reserves the optimizer's state before it exists; without it, optimizers that update the step's
    parameters are found by themselves. `count` says what the budget bounds: "live" bytes, or the "arena" in which each
    of them has an address ahead of time. `compiler="inductor"` runs the code that torch.compile makes instead of eager
    kernels, in the `mode` that torch.compile would be given; it may then compile several candidates and time them for
    `search` seconds. A budget that is too small is refused before the first step runs; a later shape that does not fit
    runs its leanest plan, with a warning, unless `on_infeasible="raise"`. With `offload="cpu"`, "cpu:64GiB" or
    "disk:/a/folder", values may also spend a while in host memory or on disk, where that is faster than computing them
    again. Sizes that change from call to call are left open from their second value on; `dynamic={"length": (1, 4096)}`
    declares them and their bounds ("batch" is dimension 0 of the arguments, "length" dimension 1), and `dynamic=False`
    captures and plans every shape for itself.
    """
    from remat.solvers import get_solver

    get_solver(solver)
    settings = Settings(
        parse_budget(budget),
        solver,
        time_limit,
        seed,
        counts=parse_budget_scope(count),
        search_s=search,
        mode=mode,
        show_progress=progress,
        offload=checked_place(offload),
        bounds=parse_bounds(dynamic),
        leaves_open=dynamic is not False,
        raises_later=parse_on_infeasible(on_infeasible),
    )
    wrapped = _wrap(step, settings, listed(optimizer), compiler)
    if result_is_dropped(inspect.currentframe()):
        warnings.warn(
            "What remat.optimize returns is dropped here, and its argument stays as it is: write "
            "model = remat.optimize(model, …).",
            stacklevel=2,
        )
    return wrapped


def apply(step: Any, plan: Plan) -> Any:
    """`step` running `plan`; a plan made for another model, torch version, device or shape is refused.

    That of a compiled step is compiled again, and not solved for. Where it is for something else, a warning says so,
    and the step is planned for the same budget.
    """
    return _wrap(step, Settings(None, plan=plan), (), None if plan.compiled is None else INDUCTOR)


def plan(
    step: Any,
    *args: Any,
    budget: str | int | float | Budget,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    solver: str = "auto",
    time_limit: float = 10.0,
    seed: int = 0,
    count: str = "live",
    compiler: str | None = None,
    mode: str | None = None,
    offload: str | None = None,
    **kwargs: Any,
) -> Plan:
    """The plan for `step(*args, **kwargs)`, made ahead of time: the step does not run. See `optimize`."""
    from remat.solvers import get_solver

    get_solver(solver)
    counts, place = parse_budget_scope(count), checked_place(offload)
    settings = Settings(parse_budget(budget), solver, time_limit, seed, counts=counts, mode=mode, offload=place)
    return plan_of(plan_ahead(step, args, kwargs, settings, listed(optimizer), compiler))


def plan_ahead(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    settings: Settings,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    compiler: str | None = None,
) -> Any:
    """The optimized step, captured and planned for these arguments but not run: its first call is a step like any."""
    planned = _wrap(step, replace(settings, stop_after_plan=True), optimizers, compiler)
    _call_until(planned, args, kwargs, PlanReady)
    session = session_of(planned)
    if session.plan is None and session.graphs:
        raise CaptureError(
            "This compiled step is several graphs, or its loss is computed outside: it is planned while it runs. Run "
            "it, and take remat.plan_of(step)."
        )
    if session.plan is None:
        raise CaptureError(NOTHING_CAPTURED)
    session.settings = replace(session.settings, stop_after_plan=False)
    return planned


def capture_ahead(
    step: Any, args: Sequence[Any], kwargs: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer] = ()
) -> Session:
    """A session whose one call is the step's first graph; nothing has been measured or run."""
    captured = _wrap(step, Settings(None, stop_after_capture=True, show_progress=False), optimizers)
    _call_until(captured, args, kwargs, CaptureReady)
    session = eager_session_of(captured)
    if not session.calls:
        raise CaptureError(NOTHING_CAPTURED)
    return session


def _call_until(step: Any, args: Sequence[Any], kwargs: Mapping[str, Any], end: type[RematError]) -> None:
    """Call a step until it raises `end`."""
    with contextlib.suppress(end), torch.enable_grad():
        _runner_of(step)(*args, **kwargs)


def plan_of(step: Any) -> Plan:
    """The plan in use by an optimized module or function."""
    made = _runner_of(step).session.plan
    if made is None:
        raise RematError(
            "There is no plan yet: it is made at the first call with gradients enabled, or after the second step where "
            "the loss is computed outside; run the step."
        )
    return made


def set_budget(step: Any, budget: str | int | float | Budget) -> None:
    """Change the budget of an optimized step: it is planned again at its next call, without being captured again."""
    _runner_of(step).session.set_budget(parse_budget(budget))


def session_of(step: Any) -> StepSession:
    """What an optimized module or function has captured and planned."""
    return _runner_of(step).session


def eager_session_of(step: Any) -> Session:
    """The same of a step that runs eager kernels, with the schedules that a compiled one does not have."""
    session = session_of(step)
    if not isinstance(session, Session):
        raise RematError("This step runs compiled code, which has no schedule of ops; leave out compiler=.")
    return session


def _runner_of(step: Any) -> Runner:
    if isinstance(step, DistributedDataParallel):
        step = step.module
    runner = compiled_call(step) if isinstance(step, nn.Module) else getattr(step, "__remat__", None)
    # A guard in front of it knows it.
    runner = getattr(runner, "__remat__", runner)
    if not isinstance(runner, Runner):
        raise RematError("This is not an optimized step; pass what remat.optimize or remat.apply returned.")
    return runner


def _wrap(
    step: Any, settings: Settings, optimizers: Sequence[torch.optim.Optimizer], compiler: str | None = None
) -> Any:
    owner = ResidentMemory(step, optimizers)
    introduce()

    def make(root_name: str) -> SessionBackend:
        return make_backend(compiler, settings, owner, root_name)

    if isinstance(step, DistributedDataParallel):
        # It has work of its own to do before and after the module's.
        return with_module(step, _wrap(step.module, settings, optimizers, compiler))
    if isinstance(step, nn.Module):
        _warn_if_called_otherwise(step)
        copied = shallow_copy(step)
        owner.meet_optimized(copied)
        replace_call(copied, Runner(plain_call(copied), make))
        return copied
    runner = Runner(step, make)

    @functools.wraps(step)
    def optimized(*args: Any, **kwargs: Any) -> Any:
        return runner(*args, **kwargs)

    optimized.__remat__ = runner  # type: ignore[attr-defined]
    return optimized


def _warn_if_called_otherwise(module: nn.Module) -> None:
    """Lightning calls a module's `training_step`, which calls other modules."""
    if any(kind.__module__.split(".")[0] in ("lightning", "pytorch_lightning") for kind in type(module).__mro__):
        warnings.warn(
            f"Lightning calls {type(module).__name__}.training_step, not the module, so nothing is planned here; "
            "give remat.integrations.lightning.Remat(budget=…) to the Trainer's callbacks, or optimize the network "
            "inside the module.",
            stacklevel=4,
        )


def listed(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> Sequence[torch.optim.Optimizer]:
    """One optimizer, several or none, as a sequence."""
    if optimizer is None:
        return ()
    return (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
