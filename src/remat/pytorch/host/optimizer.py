"""`offload_optimizer`: an optimizer whose state, and the weights that it updates, stay on the host or on a disk.

In: an optimizer of torch. Out: the same object, of a class made from its own. Its step runs its own kernels on some
parameters after another, on the device, while the state of the next ones comes and that of the last ones goes
(`state_away.py`). What is saved and loaded looks as it always did.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from remat.core.budget import BudgetUnit, parse_budget
from remat.errors import BudgetError, OffloadFailed, RematError
from remat.pytorch._compat.optimizers import bare_step, note_step, replace_step
from remat.pytorch._compat.tensors import is_plain
from remat.pytorch.host.in_backward import InBackward
from remat.pytorch.host.levels import parse_level
from remat.pytorch.host.state_away import StateAway

DEVICE_BYTES = "1.5GiB"
_BY_PARAMETER = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop"),
    *("Rprop", "SGD", "SparseAdam"),
)
"""Optimizers of torch that update each parameter by itself, so that some can go before others."""


def offload_optimizer(
    optimizer: Optimizer,
    offload: str = "cpu",
    *,
    master_weights: bool = False,
    in_backward: bool = False,
    device_bytes: int | str = DEVICE_BYTES,
) -> Optimizer:
    """Keep the state of `optimizer` in host memory or on a disk; returns the optimizer, to be used as before.

    `offload` is "cpu", "cpu:64GiB" (at most so much), "disk:/a/folder" or "disk:/a/folder:200GiB". With
    `master_weights`, parameters of lower precision are updated by way of fp32 copies, which are kept there too.
    With `in_backward`, parameters are updated as soon as backward has enough gradients, which are dropped then: for
    loops with one backward for each step, and nobody who looks at gradients in between (to clip or unscale them).
    `device_bytes` is what state on its way may take of the device; larger makes for fewer, longer copies. The update
    has the bits of one without offloading. What cannot be offloaded stays on the device, with a warning.
    """
    level = parse_level(offload)
    bucket_bytes = _parse_bytes(device_bytes) // StateAway.AT_ONCE
    if not isinstance(optimizer, Optimizer):
        raise RematError(f"What can be offloaded is an optimizer of torch, not a {type(optimizer).__name__}.")
    if isinstance(optimizer, OffloadedSteps):
        raise RematError("This optimizer is offloaded already; offload it once.")
    if in_backward and is_one_of_several():
        raise RematError(
            "Processes that train together add up their gradients after backward; leave in_backward out of "
            "offload_optimizer."
        )
    reason = _reason_against(optimizer)
    if reason:
        _stay(optimizer, reason, master_weights)
        return optimizer
    device = next(parameter.device for group in optimizer.param_groups for parameter in group["params"])
    try:
        store = level.open(device)
    except OffloadFailed as error:
        _stay(optimizer, str(error), master_weights)
        return optimizer
    away = StateAway(optimizer, store, bucket_bytes, has_masters=master_weights)
    kind: Any = type(optimizer)
    replace_step(optimizer, _offloaded_kind(kind))
    optimizer.remat_away = away
    away.send_all()
    optimizer.remat_in_backward = InBackward(optimizer, away) if in_backward else None
    return optimizer


class OffloadedSteps(Optimizer):
    """What an offloaded optimizer does in another way than its class."""

    remat_away: StateAway
    remat_in_backward: InBackward | None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        note_step(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.remat_in_backward is not None:
            self.remat_in_backward.step()
        self.remat_away.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        with self.remat_away.shown():
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with self.remat_away.loading():
            super().load_state_dict(state_dict)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RematError("An offloaded optimizer cannot be copied or pickled; copy its state_dict().")


@functools.cache
def _offloaded_kind(kind: Any) -> type[Optimizer]:
    return type(kind.__name__, (OffloadedSteps, kind), {"step": _own_step()})


def _own_step() -> Callable[..., Any]:
    """A function for each class: torch marks those that call hooks."""

    @functools.wraps(OffloadedSteps.step)
    def step(self: OffloadedSteps, closure: Callable[[], Any] | None = None) -> Any:
        return OffloadedSteps.step(self, closure)

    return step


def _reason_against(optimizer: Optimizer) -> str:
    """Why the state has to stay where it is, as a clause; empty where it can go."""
    kinds = tuple(kind for name in _BY_PARAMETER if (kind := getattr(torch.optim, name, None)) is not None)
    if bare_step(type(optimizer)) not in map(bare_step, kinds):
        return f"{type(optimizer).__name__} is not known to update each parameter by itself."
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len({parameter.device for parameter in parameters}) != 1:
        return "its parameters are on several devices."
    if not all(map(is_plain, parameters)):
        return "its parameters are of a class of their own, as sharded and quantized ones are."
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "its steps are to be differentiated."
    return ""


def is_one_of_several() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _stay(optimizer: Optimizer, reason: str, master_weights: bool) -> None:
    if master_weights:
        raise OffloadFailed(f"Master weights cannot be offloaded for {type(optimizer).__name__}: {reason}")
    warnings.warn(f"The state of {type(optimizer).__name__} stays on the device: {reason}", stacklevel=3)


def _parse_bytes(amount: int | str) -> int:
    budget = parse_budget(amount)
    if budget.unit is not BudgetUnit.BYTES:
        raise BudgetError(f'device_bytes is {amount!r}, which is not in bytes; write "1.5GiB".')
    return int(budget.amount)
