"""`remat.profile`: one training step, followed op by op.

In: a step (a module with its batch, or a function). Out: a `StepProfile`. The step runs three times from the same
random state: once to warm up, so that lazily made state exists, once against the clock, once followed. A first run
that takes long serves as the clock's too. A step that fails is followed up to where it fails.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from remat.core.garbage import collecting_only_what_is_new
from remat.core.results.profile import StepProfile
from remat.errors import ProfileStopped, RematError
from remat.pytorch.measure.follow import Follower, follower_of
from remat.pytorch.measure.measure_step import seconds_of
from remat.pytorch.measure.training_step import TrainingStep
from remat.pytorch.reach import reachable_from, reachable_modules
from remat.pytorch.rng import RngState

_LONG_S = 5.0
"""Beside a run of this length, what only a first run does takes little."""


def profile(step: Callable[..., Any], *args: Any, optimizer: Optimizer | None = None, **kwargs: Any) -> StepProfile:
    """Follow one run of `step`. A module is run forward and backward, then by `optimizer` where one is given.

    Raises `ProfileStopped`, with what was learnt so far, where the step does not come to its end.
    """
    if isinstance(step, nn.Module):
        return profile_call(TrainingStep(step, args, kwargs, optimizer), type(step).__name__)
    if optimizer is not None:
        raise RematError("`optimizer` goes with a module; a function calls its own: leave the argument out.")
    return profile_call(partial(step, *args, **kwargs), getattr(step, "__name__", type(step).__name__))


def profile_call(call: Callable[[], Any], name: str) -> StepProfile:
    """Follow one run of `call`, which is a whole step."""
    device = reachable_from(call).device()
    generators = [RngState(kind) for kind in dict.fromkeys(("cpu", device.type)) if kind in ("cpu", "cuda")]
    run = partial(_run_from, generators, call)
    seconds = 0.0
    # Where and why a step fails comes out when it is followed. That is not done in here, where the error still holds
    # the tensors of the step that failed.
    with suppress(Exception):
        seconds = _seconds(run, device)
    # What only waits to be collected is nobody's.
    gc.collect()
    return follow_call(run, call, name, device, seconds)


def follow_call(
    run: Callable[[], Any], step: Any, name: str, device: torch.device, seconds: float = 0.0
) -> StepProfile:
    """Run once while following; `step` is where everything the run can reach is found."""
    # Casts cached by an autocast region around this call would escape the count.
    torch.clear_autocast_cache()
    follower = follower_of(device, reachable_modules(step))
    follower.expect(reachable_from(step))
    try:
        with collecting_only_what_is_new(), follower.following():
            run()
    except Exception as error:
        sentence = stop_sentence(follower, error)
        found = follower.profile(name, device.type, seconds, stopped_by=sentence)
        raise ProfileStopped(sentence, found) from error
    return follower.profile(name, device.type, seconds)


def stop_sentence(follower: Follower, error: BaseException) -> str:
    """Where the step stopped and why, in one sentence."""
    if isinstance(error, RematError):
        return str(error)
    op, module = follower.failure(error)
    where = "outside of the model" if module is None else f"of module `{module}`" if module else "of the model itself"
    place = f"in `{op}` {where}" if op else f"between ops {where}"
    reason = (str(error).strip().splitlines() or [""])[0]
    return f"The step stopped {place} after {follower.op_count} ops: {type(error).__name__}: {reason}".rstrip(": ")


def _run_from(generators: list[RngState], call: Callable[[], Any]) -> None:
    for generator in generators:
        generator.restore()
    call()


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    first = seconds_of(run, device)
    return first if first > _LONG_S else seconds_of(run, device)
