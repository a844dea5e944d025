"""`optimize`, `apply`, `plan` and `plan_of`: the step a user has, running under a plan.

A module comes back as a module of the same class that shares its parameters, buffers and children; a function comes
back as a function. Both are captured at their first call with gradients enabled; without gradients they run as before.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from remat.core.budget import Budget, parse_budget, parse_budget_scope
from remat.core.results.plan import Plan
from remat.distributed.agreement.members import introduce
from remat.errors import CaptureError, RematError
from remat.pytorch._compat.distributed import shallow_copy
from remat.pytorch._compat.tensors import compiled_call, plain_call, replace_call, with_module
from remat.pytorch.host.shared import checked_place
from remat.pytorch.resident.memory import ResidentMemory
from remat.pytorch.run.backend import INDUCTOR, SessionBackend, make_backend
from remat.pytorch.run.called import result_is_dropped
from remat.pytorch.run.contract import StepSession
from remat.pytorch.run.runner import Runner
from remat.pytorch.run.session import Session
from remat.pytorch.run.settings import CaptureReady, PlanReady, Settings, parse_on_infeasible
from remat.pytorch.run.shapes.declared import parse_bounds

NOTHING_CAPTURED = (
    "No graph with gradients could be captured from this step, so there is nothing to plan; "
    "check that a parameter requires gradients and that torch.compile can trace the step."
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
