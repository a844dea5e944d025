"""Faults at random moments of a training: `python -m tests.fuzz.faults --count 200 --seed 0`.

An error, an interrupt or an out-of-memory error is raised in the middle of an op, forward or backward, in a step that
is being captured, watched or run by its plan. It has to reach the caller as it is, and the steps after it have to give
eager's bits under a plan, as if nothing had happened.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import remat

FAULTS: tuple[Callable[[], BaseException], ...] = (
    lambda: RuntimeError("a fault"),
    KeyboardInterrupt,
    lambda: torch.OutOfMemoryError("a fault"),
    lambda: ValueError("a fault"),
)
STEPS_BEFORE = 4
"""The fault comes in one of so many first steps."""


class _Fault(TorchDispatchMode):
    """Raises at an op."""

    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__()
        self.left, self.error = at, error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return func(*args, **(kwargs or {}))


def broken_promise(seed: int) -> str:
    """What went wrong with the fault of this seed; empty where nothing did."""
    choose = random.Random(seed)
    inside = choose.random() < 0.5
    model = _model(seed)
    plain = _model(seed)
    optimized = remat.optimize(model, choose.choice(("1x", "0.9x", "0.8x")), time_limit=0.3, progress=False)
    batch = torch.randn(8, 12, 16)
    fault_step, error = choose.randrange(STEPS_BEFORE), choose.choice(FAULTS)()
    fault = _Fault(choose.randrange(1, 60), error)
    for number in range(STEPS_BEFORE + 3):
        if number == fault_step:
            try:
                with fault:
                    _step(optimized, batch, inside, number)
            except BaseException as found:
                if found is not error and error not in (found.__cause__, found.__context__):
                    return f"another error came out: {type(found).__name__}: {found}"
        _step(plain, batch, inside, number)
        _step(optimized, batch, inside, number)
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            if ours.grad is None or not torch.equal(ours.grad, theirs.grad):
                return f"gradient of {name} differs in step {number}, {number - fault_step} after the fault"
    try:
        remat.plan_of(optimized)
    except remat.RematError:
        return "there is no plan"
    return ""


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)
    )


def _step(call: Any, batch: torch.Tensor, inside: bool, number: int) -> None:
    for parameter in call.parameters():
        parameter.grad = None
    torch.manual_seed(number)
    if inside:
        call(batch).pow(2).mean().backward()
    else:
        torch.nn.functional.mse_loss(call(batch), torch.zeros(8, 12, 8)).backward()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.faults", description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    began, found = time.perf_counter(), 0
    warnings.simplefilter("ignore")
    for seed in range(asked.seed, asked.seed + asked.count):
        torch._dynamo.reset()
        wrong = broken_promise(seed)
        if wrong:
            found += 1
            print(f"seed {seed}: {wrong}", flush=True)
    print(f"{asked.count} faults: {found} promises broken, {time.perf_counter() - began:.0f} s")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
