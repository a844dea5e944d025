"""`optimize`, `apply`, `plan` and `plan_of`: the step a user has, running under a plan.

A module comes back as a module of the same class that shares its parameters, buffers and children; a function comes
back as a function. Both are captured at their first call with gradients enabled; without gradients they run as before.
"""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from remat.core.budget import Budget, parse_budget, parse_count
from remat.core.plan import Plan
from remat.errors import CaptureError, RematError
from remat.integrations.transformers import masks_as_in_eager
from remat.pytorch._compat import breaks_counted, dynamo_settings, planned_under_modes, untraced
from remat.pytorch.backend import SessionBackend, make_backend
from remat.pytorch.owner import Owner
from remat.pytorch.session import CaptureReady, PlanReady, Session, Settings

NOTHING_CAPTURED = (
    "No graph with gradients could be captured from this step, so there is nothing to plan; "
    "check that a parameter requires gradients and that torch.compile can trace the step."
)
_numbers = itertools.count()


class Runner:
    """Calls the compiled step; the first calls capture and plan."""

    def __init__(self, step: Callable[..., Any], make: Callable[[str], SessionBackend]) -> None:
        self.__wrapped__ = step
        root = _root_function(step)
        backend = make(root.__name__)
        self.session: Any = backend.session
        self._compiled = torch.compile(root, backend=backend, dynamic=False)
        self._was_captured = False

    @functools.cached_property
    def _device(self) -> torch.device:
        return self.session.owner.device()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        self.session.begin_call(args, kwargs)
        breaks = breaks_counted()
        with (
            dynamo_settings(self._device),
            masks_as_in_eager(self.__wrapped__, args, kwargs),
            planned_under_modes(),
            untraced(self.session.owner.optimizers_of_step()),
        ):
            try:
                result = self._compiled(*args, **kwargs)
            except BaseException:
                self.session.abandon_call()
                raise
        self.session.end_call()
        self.session.note_skipped(reason for reason, count in breaks_counted().items() if count > breaks.get(reason, 0))
        if not self._was_captured:
            self._was_captured = True
            if not self.session.graphs and not self.session.left_out:
                warnings.warn(
                    "Nothing of this step could be captured, so it runs unplanned; TORCH_LOGS=graph_breaks tells why.",
                    stacklevel=2,
                )
        return result


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
    search: float = 0.0,
    progress: bool | None = None,
) -> Any:
    """The same step within `budget`: bytes, "8GiB", "80%" of the device or "0.5x" of the plain peak.

    `optimizer` reserves the optimizer's state before it exists; without it, optimizers that update the step's
    parameters are found by themselves. `count` says what the budget bounds: "live" bytes, or the "arena" in which each
    of them has an address ahead of time. `compiler="inductor"` runs the code that torch.compile makes instead of eager
    kernels; it may then compile several candidates and time them for `search` seconds.
    """
    from remat.solvers import get_solver

    get_solver(solver)
    settings = Settings(
        parse_budget(budget),
        solver,
        time_limit,
        seed,
        counts=parse_count(count),
        search_s=search,
        show_progress=progress,
    )
    return _wrap(step, settings, listed(optimizer), compiler)


def apply(step: Any, plan: Plan) -> Any:
    """`step` running `plan`; a plan made for another model, torch version, device or shape is refused."""
    return _wrap(step, Settings(None, plan=plan), ())


def plan(
    step: Any,
    *args: Any,
    budget: str | int | float | Budget,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    solver: str = "auto",
    time_limit: float = 10.0,
    seed: int = 0,
    count: str = "live",
    **kwargs: Any,
) -> Plan:
    """The plan for `step(*args, **kwargs)`, made ahead of time: the step does not run. See `optimize`."""
    from remat.solvers import get_solver

    get_solver(solver)
    settings = Settings(parse_budget(budget), solver, time_limit, seed, counts=parse_count(count))
    return plan_of(plan_ahead(step, args, kwargs, settings, listed(optimizer)))


def plan_ahead(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    settings: Settings,
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> Any:
    """The optimized step, captured and planned for these arguments but not run: its first call is a step like any."""
    planned = _wrap(step, replace(settings, stop_after_plan=True), optimizers)
    session = _call_until(planned, args, kwargs, PlanReady)
    if session.plan is None:
        raise CaptureError(NOTHING_CAPTURED)
    session.settings = replace(session.settings, stop_after_plan=False)
    return planned


def capture_ahead(
    step: Any, args: Sequence[Any], kwargs: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer] = ()
) -> Session:
    """A session whose one call is the step's first graph; nothing has been measured or run."""
    captured = _wrap(step, Settings(None, stop_after_capture=True, show_progress=False), optimizers)
    session = _call_until(captured, args, kwargs, CaptureReady)
    if not session.calls:
        raise CaptureError(NOTHING_CAPTURED)
    return session


def _call_until(step: Any, args: Sequence[Any], kwargs: Mapping[str, Any], end: type[RematError]) -> Session:
    """The session of a step that was called until it raised `end`."""
    runner = _runner_of(step)
    try:
        with torch.enable_grad():
            runner(*args, **kwargs)
    except end:
        pass
    return runner.session


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


def session_of(step: Any) -> Session:
    """What an optimized module or function has captured and planned."""
    return _runner_of(step).session


def _runner_of(step: Any) -> Runner:
    runner = step._compiled_call_impl if isinstance(step, nn.Module) else getattr(step, "__remat__", None)
    if not isinstance(runner, Runner):
        raise RematError("This is not an optimized step; pass what remat.optimize or remat.apply returned.")
    return runner


def _wrap(
    step: Any, settings: Settings, optimizers: Sequence[torch.optim.Optimizer], compiler: str | None = None
) -> Any:
    owner = Owner(step, optimizers)

    def make(root_name: str) -> SessionBackend:
        return make_backend(compiler, settings, owner, root_name)

    if isinstance(step, nn.Module):
        twin = copy.copy(step)
        twin._compiled_call_impl = Runner(twin._call_impl, make)
        return twin
    runner = Runner(step, make)

    @functools.wraps(step)
    def optimized(*args: Any, **kwargs: Any) -> Any:
        return runner(*args, **kwargs)

    optimized.__remat__ = runner  # type: ignore[attr-defined]
    return optimized


def _root_function(step: Callable[..., Any]) -> Any:
    """A function of its own for each optimized step: Dynamo counts recompilations by code object."""

    def root(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    root.__code__ = root.__code__.replace(co_name=f"remat_step_{next(_numbers)}")
    root.__name__ = root.__code__.co_name
    return root


def listed(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> Sequence[torch.optim.Optimizer]:
    """One optimizer, several or none, as a sequence."""
    if optimizer is None:
        return ()
    return (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
